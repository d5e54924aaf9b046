"""Results that have everything a report can show: a tiny model on hostile prompts, all questions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.conftest import PROMPTS

if TYPE_CHECKING:
    from pathlib import Path

_NOTE = "the note says that the code of the door is seven and the rest is about the garden"
ASKED = [
    {
        "id": f"needle-{number}",
        "domain": "retrieval",
        "context": f"{'on and on the river ran ' * number}{_NOTE}",
        "question": "What is the code?",
        "spans": [{"kind": "needle", "text": "seven"}],
    }
    for number in (1, 2, 3)
]


@pytest.fixture(scope="session")
def rich_results(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Return results at three levels, with layers, heads, stacking, candidates and attention."""
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record
    from tracekit.simulate.layer_plan import make_sweep
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate

    folder = tmp_path_factory.mktemp("rich")
    prompts = folder / "prompts.jsonl"
    lines = (json.dumps(one) + "\n" for one in (*PROMPTS, *ASKED))
    prompts.write_text("".join(lines), encoding="utf-8")
    options = RecordOptions(max_new_tokens=9, capture="influence")
    assert not record(str(model_folder), str(prompts), folder / "trace", options).skipped
    plan = make_plan(
        ["random", "snapkv", "h2o:every=4", "quest", "oracle", "h2o:kept=0.5+int4"],
        ["oracle", "frequency", "neighbours:n=0", "previous@rate"],
        kept=(0.25, 0.5),
        sizes=(16, 64),
        attention=True,
        levels=("local", "predicted", "propagated"),
        sweep=make_sweep(("snapkv",), kept=("0.3",), heads=True),
    )
    assert not simulate(folder / "trace", folder / "results", plan).failed
    return folder / "results"
