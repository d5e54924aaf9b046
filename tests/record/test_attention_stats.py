from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.record import attention_stats
from tracekit.record.attention_stats import KeyTotals, Wanted, attention_rows, num_entries
from tracekit.record.ragged import attention_table
from tracekit.spec import LayerSpec

SIZE = 8


def layer(window: int | None, *, sinks: bool, softcap: float | None) -> LayerSpec:
    return LayerSpec(
        index=3,
        kind="full" if window is None else "sliding",
        num_heads=4,
        num_kv_heads=2,
        head_dim=SIZE,
        value_dim=SIZE,
        scale=0.7,
        window=window,
        softcap=softcap,
        sinks=(0.5, -1.0, 2.0, 0.0) if sinks else None,
    )


@given(
    num_tokens=st.integers(1, 40),
    cut=st.integers(0, 40),
    window=st.sampled_from([None, 1, 5, 16]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    top_k=st.integers(1, 50),
    block=st.sampled_from([4, 400, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_rows_maps_and_totals_are_those_of_one_whole_map(
    num_tokens: int,
    cut: int,
    window: int | None,
    sinks: bool,
    softcap: float | None,
    top_k: int,
    block: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    spec = layer(window, sinks=sinks, softcap=softcap)
    query, key = torch.randn(4, num_tokens, SIZE), torch.randn(2, num_tokens, SIZE)
    wanted = Wanted(top_k, frozenset({3}))
    totals = KeyTotals.empty(2)
    cuts = sorted({0, min(cut, num_tokens), num_tokens})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_stats, "BLOCK_BYTES", block)
        for first, stop in itertools.pairwise(cuts):
            got = attention_rows(
                query[:, first:stop], key[:, :stop], spec, totals, first_query=first, wanted=wanted
            )
            check_rows(got, oracle_map(query, key, spec)[:, first:stop], spec, first, top_k)
    whole = oracle_map(query, key, spec)
    grouped = whole.reshape(2, 2, num_tokens, num_tokens)
    np.testing.assert_allclose(totals.mass_GK, grouped.sum((1, 2)), atol=1e-5)


def oracle_map(query: torch.Tensor, key: torch.Tensor, spec: LayerSpec) -> np.ndarray:
    """Return attention [H, T, T] by loops, from the formula."""
    num_heads, num_tokens, _ = query.shape
    out = np.zeros((num_heads, num_tokens, num_tokens))
    for head in range(num_heads):
        for t in range(num_tokens):
            first = 0 if spec.window is None else max(0, t - spec.window + 1)
            logits = []
            for k in range(first, t + 1):
                z = spec.scale * float(query[head, t].double() @ key[head // 2, k].double())
                logits.append(
                    z if spec.softcap is None else spec.softcap * np.tanh(z / spec.softcap)
                )
            rest = [] if spec.sinks is None else [spec.sinks[head]]
            exp = np.exp(np.array(logits + rest))
            out[head, t, first : t + 1] = exp[: len(logits)] / exp.sum()
    return out


def check_rows(
    got: dict[str, torch.Tensor], maps: np.ndarray, spec: LayerSpec, first: int, top_k: int
) -> None:
    num_heads, num_rows, _ = maps.shape
    entries = num_entries(spec, first, num_rows)
    columns = attention_table({name: one.numpy() for name, one in got.items()}, entries, top_k)
    at = 0
    for head in range(num_heads):
        for row in range(num_rows):
            t = first + row
            seen = maps[head, row, t + 1 - entries[row] : t + 1]
            total = seen.sum()
            share = seen / total
            assert columns["entropy_nats"][at] == pytest.approx(
                -(share * np.log(share)).sum(), abs=1e-4
            )
            assert columns["sink_mass"][at] == pytest.approx(maps[head, row, :4].sum(), abs=1e-5)
            raw = np.frombuffer(columns["map"][at].as_py(), np.float16)
            np.testing.assert_allclose(raw, seen, atol=1e-3)
            keys = columns["top_keys"][at].as_py()
            weights = columns["top_weights"][at].as_py()
            assert len(keys) == len(set(keys)) == min(top_k, entries[row])
            np.testing.assert_allclose(weights, np.sort(seen)[::-1][: len(keys)], atol=1e-5)
            np.testing.assert_allclose(weights, maps[head, row, keys], atol=1e-5)
            assert columns["rest_mass"][at] == pytest.approx(total - sum(weights), abs=1e-5)
            at += 1
