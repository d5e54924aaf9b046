from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracekit.model.cache_bytes import LayerBytes
from tracekit.record.passes import Pass, Passes

EACH = 24
"""Bytes of one entry of one sequence."""


def passes_of(pad: int, lengths: list[int], batch_size: int, window: int) -> Passes:
    """Return what a batch's cache shows: a full layer, a sliding one, and a state."""
    passes, stop = Passes(batch_size), 0
    for number, count in enumerate(lengths):
        stop += count
        entries = [stop, min(stop, window - 1), 0]
        layers = [
            LayerBytes(
                layer=index,
                entries=held,
                logical_bytes=batch_size * EACH * (held or 5),
                resident_bytes=batch_size * 1000,
            )
            for index, held in enumerate(entries)
        ]
        passes.add(
            Pass(
                stop=stop,
                num_columns=count,
                path="decode" if number else "prefill",
                wall_s=0.5,
                device_bytes=None,
                layers=layers,
            )
        )
    assert pad < lengths[0]
    return passes


@given(
    pad=st.integers(0, 9),
    prompt=st.integers(10, 20),
    new=st.integers(0, 12),
    batch_size=st.integers(1, 3),
    window=st.integers(2, 14),
    cut=st.integers(0, 40),
)
def test_a_sequence_counts_its_own_entries_whatever_is_padded_before_it(
    pad: int, prompt: int, new: int, batch_size: int, window: int, cut: int
) -> None:
    lengths = [prompt] + [1] * new
    passes = passes_of(pad, lengths, batch_size, window)
    end = prompt + new
    cut = min(max(cut, pad), end)
    rows = [passes.kv_rows(pad, pad, cut), passes.kv_rows(pad, cut, end)]
    got = {name: [int(x) for part in rows for x in part[name]] for name in rows[0]}
    wanted: dict[str, list[int]] = {name: [] for name in got}
    for t in range(prompt - pad, end - pad + 1):
        # What the sequence would hold if it had run alone.
        held = [t, min(t, window - 1), 0]
        # A sliding layer that still has room for padding holds less of the sequence.
        columns_held = min(t + pad, window - 1)
        held[1] = columns_held - max(0, pad - (t + pad - columns_held))
        for index, entries in enumerate(held):
            wanted["position"].append(t)
            wanted["layer"].append(index)
            wanted["entries"].append(entries)
            wanted["logical_bytes"].append(EACH * (entries if index < 2 else 5))
            wanted["resident_bytes"].append(1000)
    assert got == wanted


def test_time_and_bytes_stand_in_the_last_row_of_a_pass() -> None:
    passes = passes_of(2, [5, 1, 1], 1, 100)
    rows = passes.step_columns(2, 2, 7)
    assert rows["path"] == ["prefill"] * 3 + ["decode"] * 2
    assert rows["wall_s"] == [None, None, 0.5, 0.5, 0.5]
    assert rows["kv_bytes"][2:] == [EACH * (2 * n + 5) for n in (3, 4, 5)]
    first, second = passes.step_columns(2, 2, 4), passes.step_columns(2, 4, 7)
    assert {name: first[name] + second[name] for name in rows} == rows
