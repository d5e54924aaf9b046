"""What ``run.json`` tells of needles, the tokenizer and the recorder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.simulate.manifest import _needle, make_manifest
from tracekit.simulate.plan import make_plan
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

NEEDLE = [{"kind": "needle", "text": "seven"}]
PROMPTS = [
    {"id": "text", "domain": "a", "text": "on and on, code seven, on and on", "spans": NEEDLE},
    {"id": "prompt", "domain": "a", "prompt": "The code is seven. On and on.", "spans": NEEDLE},
    {
        "id": "context",
        "domain": "a",
        "context": "The code of the door is seven. On and on.",
        "question": "Which code?",
        "spans": NEEDLE,
    },
    {"id": "none", "domain": "a", "prompt": "on and on"},
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Trace:
    folder = tmp_path_factory.mktemp("needles")
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS), encoding="utf-8")
    options = RecordOptions(max_new_tokens=3, capture="steps")
    assert not record(str(model_folder), str(path), folder / "trace", options).skipped
    return Trace(folder / "trace")


def by_id(trace: Trace) -> dict[str, dict[str, Any]]:
    return {one["prompt_id"]: one for one in make_manifest(trace, make_plan())["sequences"]}


def test_a_needle_has_the_position_of_its_first_token(trace: Trace) -> None:
    sequences = by_id(trace)
    tokens = trace.table("tokens")
    for name in ("text", "prompt", "context"):
        of = tokens[tokens["sequence_id"] == f"{name}#0"].sort_values("position")
        position = next(
            at for at, span in zip(of["position"], of["span"], strict=True) if span == "needle"
        )
        assert sequences[name]["needle_position"] == position


def test_its_depth_is_a_share_of_the_context_else_of_the_prompt(trace: Trace) -> None:
    sequences = by_id(trace)
    for name, end in (("text", "prompt_end"), ("prompt", "prompt_end"), ("context", "context_end")):
        one = sequences[name]
        assert one["needle_depth_frac"] == one["needle_position"] / one[end]
        assert 0 < one["needle_depth_frac"] < 1
    assert sequences["context"]["context_end"] < sequences["context"]["prompt_end"]


def test_in_plain_text_its_depth_is_a_share_of_all_of_it() -> None:
    row = pd.Series({"context_end": None, "prompt_end": np.nan, "num_tokens": 40}, dtype=object)
    assert _needle(row, 10) == {"needle_position": 10, "needle_depth_frac": 0.25}
    assert _needle(row, 0)["needle_depth_frac"] == 0


def test_without_a_needle_both_are_null(trace: Trace) -> None:
    one = by_id(trace)["none"]
    assert one["needle_position"] is None
    assert one["needle_depth_frac"] is None


def test_the_tokenizer_and_the_recorder_of_the_trace_are_told(trace: Trace) -> None:
    told = make_manifest(trace, make_plan())["trace"]
    assert told["tokenizer"] == {"sha256": trace.manifest["tokenizer_sha256"]}
    assert told["versions"]["tracekit"] == trace.manifest["versions"]["tracekit"]


def test_a_trace_that_does_not_know_its_tokenizer_has_null(trace: Trace) -> None:
    old = Trace(trace.path)
    del old.manifest["tokenizer_sha256"]
    assert make_manifest(old, make_plan())["trace"]["tokenizer"] == {"sha256": None}
