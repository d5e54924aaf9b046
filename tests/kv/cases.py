"""Small random stacks of layers for the KV engine, and the slow twin run on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests import oracles
from tracekit.kv.replay import Reference
from tracekit.kv.schedule import Spans
from tracekit.spec import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay

SEED = 7


@dataclass(frozen=True)
class Case:
    """Recorded rows of a stack of layers (numpy, float64)."""

    layer: LayerSpec
    query_LHTD: np.ndarray
    key_LGTD: np.ndarray
    value_LGTD: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.key_LGTD.shape[2]

    @property
    def layers(self) -> range:
        return range(3, 3 + len(self.key_LGTD))

    @property
    def reference(self) -> Reference:
        return Reference(
            query_LHTD=self.query_LHTD,
            key_LGTD=self.key_LGTD,
            value_LGTD=self.value_LGTD,
            layer=self.layer,
        )

    def spans(self, **ends: Any) -> Spans:
        return Spans(num_tokens=self.num_rows + 1, **ends)


def make_case(
    *,
    layers: int = 2,
    groups: int = 2,
    group_size: int = 2,
    rows: int = 24,
    size: int = 4,
    seed: int = 0,
    spread: float = 1.0,
    whole: bool = False,
    **spec: Any,
) -> Case:
    """Return normal numbers of a given spread, made whole where ties are wanted."""
    draw, heads = np.random.default_rng(seed), groups * group_size
    arrays = [spread * draw.normal(size=(layers, n, rows, size)) for n in (heads, groups, groups)]
    layer = LayerSpec(
        index=0,
        kind="sliding" if spec.get("window") else "full",
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=size,
        value_dim=size,
        scale=size**-0.5,
        **spec,
    )
    return Case(layer, *((np.round(array) if whole else array) for array in arrays))


@st.composite
def cases(draw: st.DrawFn, *, min_rows: int = 1) -> Case:
    """Draw a case: heads, groups, lengths, ties, extreme values, windows, sinks, soft-caps."""
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sinks = draw(st.none() | st.lists(st.floats(-5, 5), min_size=9, max_size=9))
    return make_case(
        layers=draw(st.integers(1, 2)),
        groups=groups,
        group_size=group_size,
        rows=draw(st.integers(min_rows, 40)),
        size=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 2**32)),
        spread=draw(st.sampled_from([0.0, 1.0, 1.0, 30.0])),
        whole=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.just(5.0)),
        sinks=None if sinks is None else tuple(sinks[: groups * group_size]),
    )


TEXTS = [
    "full",
    "random",
    "random:every=3",
    "streaming",
    "streaming:at=prompt",
    "window:recent=0.5,sinks=1",
    "h2o",
    "h2o:every=4,reduce=max",
    "h2o:reduce=sum,sinks=2,recent=3",
    "h2o:at=prompt",
    "snapkv:window=3",
    "snapkv:window=2,kernel=3,pool=max,order=group_pool,reduce=max",
    "snapkv:window=5,kernel=3,pool=max,recent=2,every=4",
    "snapkv:window=4,kernel=1,reduce=max,recent=0,sinks=3",
    "knorm",
    "knorm:every=2,recent=2",
]
POLICIES = st.sampled_from(TEXTS)
KEPT = st.lists(st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=3)


def slow_scores(policy: Policy) -> Callable[[oracles.SlowLayer, int], dict[int, float]]:
    """Return the twin of a policy's scorer."""
    scorer: Any = policy.scorer
    makers: dict[str, Callable[[], Any]] = {
        "full": lambda: oracles.zero_scores,
        "random": lambda: oracles.random_scores(SEED),
        "streaming": lambda: oracles.recency_scores,
        "window": lambda: oracles.recency_scores,
        "h2o": lambda: oracles.received_scores,
        "knorm": lambda: oracles.key_norm_scores,
        "snapkv": lambda: oracles.window_scores(
            scorer.window, scorer.kernel, scorer.pool, scorer.reduce, scorer.order
        ),
    }
    return makers[policy.name]()


def assert_like_slow(case: Case, policy: Policy, n: int, result: Replay) -> None:
    """Compare policy number ``n`` of a replay with the twin, layer by layer, row by row."""
    scores = slow_scores(policy)
    decisions = policy.schedule.decisions(result.first_row, case.num_rows)
    clipped = False
    for at, number in enumerate(case.layers):
        stack = (case.query_LHTD[at], case.key_LGTD[at], case.value_LGTD[at])
        layer = replace(case.layer, index=number)
        how = getattr(policy.scorer, "reduce", "mean")
        slow = oracles.SlowLayer(layer, *stack, group_reduce=how)
        full = oracles.SlowLayer(layer, *stack)
        for t in range(case.num_rows):
            if t in decisions:
                budget = max(1, int(round(policy.kept.amount * t, 9)))
                recent = policy.protection.recent.of(budget)
                slow.decide(scores, budget, policy.protection.sinks, recent)
            outputs, truths = np.array(slow.step()), np.array(full.step())
            if t < result.first_row:
                continue
            row = t - result.first_row
            error_sq_H = ((outputs - truths) ** 2).sum(-1)
            scale = 1 + np.abs(case.value_LGTD).max() ** 2
            np.testing.assert_allclose(
                result.error_sq_NLHR[n, at, :, row] / scale, error_sq_H / scale, atol=1e-9
            )
            held_G = [len(held) for held in slow.held]
            assert result.held_NLGR[n, at, :, row].tolist() == held_G
            assert result.full_R[row] == len(full.held[0])
            for h in range(layer.num_heads):
                held = slow.held[h // layer.group_size]
                weights = full.attention(h, t, full.held[h // layer.group_size])
                mass = sum(weights[j] for j in held)
                np.testing.assert_allclose(result.mass_kept_NLHR[n, at, h, row], mass, atol=1e-9)
        for g, evicted in enumerate(slow.evicted_at):
            found = result.evicted_at_NLGT[n, at, g]
            assert {j: int(found[j]) for j in np.flatnonzero(found < 2**31 - 1)} == evicted
        clipped |= slow.clipped
    assert result.is_clipped_N[n] == clipped
