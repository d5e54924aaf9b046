"""Estimates of a trace's size against the files that recordings leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests import tiny
from tracekit.record.estimate import (
    TABLE_FACTOR,
    Length,
    estimate_bytes,
)
from tracekit.record.estimate_time import estimate_seconds
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.spec import ModelSpec

EXACT = ("weights.safetensors", "tensors.parquet")


def sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of a trace's files, shards added up."""
    found: Counter[str] = Counter()
    for path in folder.rglob("*.*"):
        if path.suffix in (".parquet", ".safetensors"):
            found[path.name] += path.stat().st_size
    return dict(found)


def lengths_of(trace: Trace) -> list[Length]:
    """Return what was given and what was made in each sequence."""
    made = trace.table("tokens").groupby("sequence_id", observed=True)["is_generated"].sum()
    frame = trace.sequences.set_index("sequence_id")
    whole = frame["num_tokens"]
    probed = (whole - 1 - frame["probed_from"]).fillna(0)
    return [
        Length(int(whole[one] - made[one]), int(made[one]), int(probed[one])) for one in frame.index
    ]


def assert_close(folder: Path, **options: Any) -> None:
    """Compare the estimate of a trace with its files."""
    trace, real = Trace(folder), sizes(folder)
    found = estimate_bytes(trace.spec, lengths_of(trace), **options)
    assert found.keys() == real.keys()
    for name, size in real.items():
        if name in EXACT:
            # Headers of some hundred bytes a block weigh in the tiny tensors of tiny models.
            assert found[name] == pytest.approx(size, rel=0.02, abs=0.01 * sum(real.values()))
        else:
            assert 1 / TABLE_FACTOR <= found[name] / size <= TABLE_FACTOR, (name, found[name], size)


def test_a_tiny_trace_is_as_large_as_estimated(trace_folder: Path) -> None:
    assert_close(trace_folder, capture="qkv", dtype_store="native", head="store")


@pytest.mark.parametrize(
    ("model_type", "extra", "options"),
    [
        ("llama", {}, {"capture": "qkv", "dtype_store": "float16", "head": "omit"}),
        ("llama", {}, {"capture": "hidden", "dtype_store": "native", "head": "store"}),
        ("llama", {}, {"capture": "steps", "dtype_store": "native", "head": "omit"}),
        (
            "mistral",
            {"sliding_window": 64, "tie_word_embeddings": False},
            {"capture": "qkv", "dtype_store": "native", "head": "store"},
        ),
        (
            "llama",
            {},
            {
                "capture": "hidden",
                "dtype_store": "native",
                "head": "omit",
                "maps": (1, 3),
                "attention_topk": 6,
            },
        ),
        (
            "llama",
            {},
            {
                "capture": "influence",
                "dtype_store": "native",
                "head": "omit",
                "probes": ProbeOptions(number=5, layers=(0, 1, 3)),
            },
        ),
    ],
    ids=["half", "hidden", "steps", "window", "entries", "probes"],
)
def test_estimates_hold_for_every_capture_level_and_kind_of_model(
    tmp_path: Path,
    prompt_file: Path,
    model_type: str,
    extra: dict[str, Any],
    options: dict[str, Any],
) -> None:
    from tracekit.record.recorder import record

    tiny.model(model_type, **extra).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    settings = RecordOptions(max_new_tokens=40, **options)
    record(str(tmp_path / "model"), str(prompt_file), tmp_path / "trace", settings)
    assert_close(tmp_path / "trace", **options)


def spec_of(trace_folder: Path) -> ModelSpec:
    return Trace(trace_folder).spec


def attention_bytes(spec: ModelSpec, length: Length, *, maps: tuple[int, ...], topk: int) -> int:
    found = estimate_bytes(
        spec,
        [length],
        capture="qkv",
        dtype_store="native",
        head="omit",
        maps=maps,
        attention_topk=topk,
    )
    return found["attention.parquet"]


def test_maps_cost_two_bytes_a_visible_key_and_largest_entries_five(trace_folder: Path) -> None:
    spec, length = spec_of(trace_folder), Length(30, 11)
    plain = attention_bytes(spec, length, maps=(), topk=0)
    heads = spec.layers[0].num_heads
    visible = sum(t + 1 for t in range(40))
    assert attention_bytes(spec, length, maps=(1, 2), topk=0) - plain == 2 * 2 * heads * visible
    with_top = attention_bytes(spec, length, maps=(), topk=5)
    assert with_top - plain == len(spec.layers) * heads * 40 * 5 * 5


def test_maps_of_a_sliding_layer_are_its_window(trace_folder: Path) -> None:
    spec, length = spec_of(trace_folder), Length(30, 11)
    layers = tuple(replace(layer, kind="sliding", window=7) for layer in spec.layers)
    spec = replace(spec, layers=layers)
    more = attention_bytes(spec, length, maps=(3,), topk=0)
    less = attention_bytes(spec, length, maps=(), topk=0)
    assert more - less == 2 * spec.layers[3].num_heads * sum(min(t + 1, 7) for t in range(40))


def test_nothing_to_record_is_only_what_all_sequences_share(trace_folder: Path) -> None:
    found = estimate_bytes(
        spec_of(trace_folder), [], capture="qkv", dtype_store="native", head="store"
    )
    assert set(found) == {"vocab.parquet", "weights.safetensors"}


def test_twice_the_work_is_estimated_at_twice_the_time(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tracekit.model.load import load_model
    from tracekit.record import estimate_time

    loaded, length = load_model(str(model_folder)), Length(100, 10)
    assert estimate_seconds(loaded, [length]) > 0
    monkeypatch.setattr(estimate_time, "_time_once", lambda loaded: (0.64, 0.5))
    assert estimate_seconds(loaded, [length]) == pytest.approx(100 * 0.01 + 10 * 0.5)
    assert estimate_seconds(loaded, [length] * 2) == pytest.approx(12)
    assert estimate_seconds(loaded, []) == 0


@pytest.mark.slow
def test_a_real_trace_is_as_large_as_estimated(tmp_path: Path) -> None:
    from tracekit.record.prompts import read_prompts
    from tracekit.record.recorder import record

    core = read_prompts("core")
    few = replace(core, prompts=core.prompts[:3])
    record("smollm2-135m", few, tmp_path / "trace", RecordOptions(max_new_tokens=16))
    assert_close(tmp_path / "trace", capture="qkv", dtype_store="native", head="store")
    trace, real = Trace(tmp_path / "trace"), sizes(tmp_path / "trace")
    found = estimate_bytes(
        trace.spec, lengths_of(trace), capture="qkv", dtype_store="native", head="store"
    )
    for name in EXACT:
        assert found[name] == pytest.approx(real[name], rel=0.02)
