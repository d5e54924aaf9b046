"""The recorder on a CUDA device; skipped without one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
import torch

from tests.record.test_session import PROMPTS, sorted_frame
from tracekit.model.load import load_model
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.record.sampler import Sampler
from tracekit.trace.reader import Trace
from tracekit.trace.validate import validate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_recording_on_the_device_is_that_of_the_cpu(
    model_folder: Path, prompts: str, tmp_path: Path, batch_size: int
) -> None:
    options = RecordOptions(
        max_new_tokens=8,
        batch_size=batch_size,
        maps="all",
        attention_topk=4,
        hidden_layers="all",
    )
    for device in ("cpu", "cuda"):
        record(load_model(str(model_folder), device=device), prompts, tmp_path / device, options)
        assert not validate(tmp_path / device).problems
    here, there = Trace(tmp_path / "cpu"), Trace(tmp_path / "cuda")
    for name in ("tokens", "steps", "attention", "keys"):
        frames = [
            sorted_frame(trace, name).drop(
                columns=["device_bytes", "map", "top_weights"], errors="ignore"
            )
            for trace in (here, there)
        ]
        pd.testing.assert_frame_equal(*frames, rtol=1e-3, atol=1e-3)
    for sequence_id in here.sequence_ids:
        for layer in here.stored_layers(sequence_id):
            mine, theirs = (one.attention_inputs(sequence_id, layer) for one in (here, there))
            for kind, block in mine.items():
                np.testing.assert_allclose(block.data, theirs[kind].data, atol=1e-3, rtol=1e-3)
        for layer in here.residual_layers:
            states = [one.residual(sequence_id, layer).data for one in (here, there)]
            np.testing.assert_allclose(*states, atol=1e-3, rtol=1e-3)


def test_device_memory_stands_in_the_steps(
    model_folder: Path, prompts: str, tmp_path: Path
) -> None:
    loaded = load_model(str(model_folder), device="cuda")
    record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=4))
    steps = Trace(tmp_path / "t").table("steps")
    assert (steps["device_bytes"].dropna() > 0).all()
    assert steps.loc[steps["wall_s"].notna(), "device_bytes"].notna().all()


def test_sampling_on_the_device_is_repeated_by_its_seed(
    model_folder: Path, prompts: str, tmp_path: Path
) -> None:
    loaded = load_model(str(model_folder), device="cuda")
    texts = []
    for name in ("a", "b"):
        options = RecordOptions(max_new_tokens=8, sampler=Sampler(temperature=1.3))
        record(loaded, prompts, tmp_path / name, options)
        texts.append(Trace(tmp_path / name).table("tokens")["token_id"].tolist())
    assert texts[0] == texts[1]


def test_bfloat16_leaves_the_device_bit_for_bit(
    model_folder: Path, prompts: str, tmp_path: Path
) -> None:
    loaded = load_model(str(model_folder), device="cuda", dtype="bfloat16")
    record(loaded, prompts, tmp_path / "t", RecordOptions(max_new_tokens=4))
    trace = Trace(tmp_path / "t")
    assert trace.attention_inputs(trace.sequence_ids[0], 0)["query"].dtype == "bfloat16"
    assert not validate(tmp_path / "t").problems
