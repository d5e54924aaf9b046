"""Made-up layers, tensors and attention rows for the tests of attention statistics."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tracekit.measure.attention_shape import Rows
from tracekit.spec import LayerSpec

SIZE = 4


@st.composite
def layers(draw: st.DrawFn) -> LayerSpec:
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = groups * group_size
    window = draw(st.none() | st.integers(1, 12))
    return LayerSpec(
        index=0,
        kind="full" if window is None else "sliding",
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=SIZE,
        value_dim=SIZE,
        scale=draw(st.sampled_from([0.0, 0.5, 3.0])),
        window=window,
        softcap=draw(st.none() | st.just(4.0)),
        sinks=tuple(map(float, range(heads))) if draw(st.booleans()) else None,
    )


def random(*shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def rows_of(weights: Any, *, first_query: int = 0, first_key: int = 0) -> Rows:
    """Return the rows of one head over keys that are all seen up to the query."""
    weights_HQK = torch.tensor(weights, dtype=torch.float64)[None]
    queries, keys = weights_HQK.shape[1:]
    seen = torch.arange(keys) + first_key <= torch.arange(queries)[:, None] + first_query
    return Rows(weights_HQK, seen, torch.ones(1, queries), first_query, first_key)
