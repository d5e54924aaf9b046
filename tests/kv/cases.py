"""Small random stacks of layers for the KV engine, the engine and its slow twin run on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests import oracles
from tracekit.kv.amounts import parse_kept
from tracekit.kv.engine import NEVER, Engine
from tracekit.kv.policy import parse
from tracekit.kv.replay import Reference
from tracekit.kv.schedule import Spans
from tracekit.spec import LayerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.query_LHTD, self.key_LGTD, self.value_LGTD

    @property
    def reference(self) -> Reference:
        return self.reference_in(torch.float64)

    def reference_in(self, dtype: torch.dtype) -> Reference:
        names = ("query_LHTD", "key_LGTD", "value_LGTD")
        tensors = dict(zip(names, self.rows(0, self.num_rows, dtype), strict=True))
        return Reference(**tensors, layer=self.layer)

    def rows(
        self, start: int, end: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (torch.tensor(a[:, :, start:end]).to(dtype) for a in self.arrays)
        return query, key, value

    def rounded(self, dtype: torch.dtype) -> Case:
        """Return the case that a type can hold exactly."""
        return Case(self.layer, *(a.double().numpy() for a in self.rows(0, self.num_rows, dtype)))

    def with_noise_from(self, row: int) -> Case:
        """Return the case with queries, keys and values from a row on replaced by noise."""
        draw = np.random.default_rng(row)
        arrays = [array.copy() for array in self.arrays]
        for array in arrays:
            array[:, :, row:] = 5 * draw.normal(size=array[:, :, row:].shape)
        return Case(self.layer, *arrays)

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
KEPT = st.lists(
    st.sampled_from(["0.05", "0.1", "0.25", "0.3", "0.5", "0.9", "1.0", "1tok", "7tok", "60tok"]),
    min_size=1,
    max_size=3,
)


def family(text: str, kept: Sequence[str]) -> list[Policy]:
    """Return the policies that a text names with several kept amounts; ``full`` takes none."""
    policy = parse(text)
    if not policy.scorer.evicts:
        return [policy]
    return [replace(policy, kept=parse_kept(one)) for one in kept]


@dataclass(frozen=True)
class Run:
    """What an engine did, row by row: outputs [N, L, H, R, D] and held keys around decisions."""

    engine: Engine
    output_NLHRD: torch.Tensor
    decisions: list[tuple[int, torch.Tensor, torch.Tensor]]


def run_rows(
    case: Case, policies: Sequence[Policy], point: int, dtype: torch.dtype = torch.float64
) -> Run:
    """Call the engine one row at a time."""
    engine = Engine(case.layer, case.layers, policies, SEED)
    due = policies[0].schedule.decisions(point, case.num_rows)
    outputs, decisions = [], []
    for t in range(case.num_rows):
        if t in due:
            before = engine.held_NLGK.clone()
            engine.decide()
            decisions.append((t, before, engine.held_NLGK.clone()))
        row = case.rows(t, t + 1, dtype)
        if t < point:
            engine.absorb(*row)
        else:
            outputs.append(engine.read(*row))
    return Run(engine, torch.cat(outputs, dim=-2), decisions)


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


@dataclass(frozen=True)
class SlowRun:
    """What the twin did on one layer; scored rows last, or last but one."""

    output_HRD: np.ndarray
    full_HRD: np.ndarray
    held_GR: np.ndarray
    mass_HR: np.ndarray
    evicted_at_GT: np.ndarray
    is_clipped: bool
    is_clamped: bool


def run_slow(case: Case, at: int, policy: Policy, point: int) -> SlowRun:
    """Run the twin on layer number ``at`` of the stack."""
    layer = replace(case.layer, index=case.layers[at])
    how = getattr(policy.scorer, "reduce", "mean")
    slow = oracles.SlowLayer(layer, *(array[at] for array in case.arrays), group_reduce=how)
    scores, protection = slow_scores(policy), policy.protection
    due = policy.schedule.decisions(point, case.num_rows)
    outputs, fulls, held, masses, clamped = [], [], [], [], False
    for t in range(case.num_rows):
        if t in due:
            budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, t))
            recent = oracles.entries(protection.recent.amount, protection.recent.unit, budget)
            clamped |= budget > min(t, layer.window or t)
            slow.decide(scores, budget, protection.sinks, recent)
        output = slow.step()
        if t < point:
            continue
        weights = [slow.attention(h, t, range(t + 1)) for h in range(layer.num_heads)]
        groups = [h // layer.group_size for h in range(layer.num_heads)]
        outputs.append(output)
        fulls.append([slow.output(row, g) for row, g in zip(weights, groups, strict=True)])
        held.append([len(keys) for keys in slow.held])
        masses.append(
            [sum(row[j] for j in slow.held[g]) for row, g in zip(weights, groups, strict=True)]
        )
    return SlowRun(
        output_HRD=np.array(outputs).swapaxes(0, 1),
        full_HRD=np.array(fulls).swapaxes(0, 1),
        held_GR=np.array(held).T,
        mass_HR=np.array(masses).T,
        evicted_at_GT=np.array(
            [[gone.get(j, NEVER) for j in range(case.num_rows)] for gone in slow.evicted_at]
        ),
        is_clipped=slow.clipped,
        is_clamped=clamped,
    )


def assert_like_slow(
    case: Case, policy: Policy, n: int, result: Replay, *, atol: float = 1e-9
) -> None:
    """Compare policy number ``n`` of a replay with the twin, layer by layer, row by row."""
    slows = [run_slow(case, at, policy, result.first_row) for at in range(len(case.layers))]
    size = 1 + np.abs(case.value_LGTD).max()

    def close(found: np.ndarray, true: list[np.ndarray], scale: float = 1.0) -> None:
        np.testing.assert_allclose(found / scale, np.array(true) / scale, atol=atol, rtol=0)

    evicted_at = [slow.evicted_at_GT for slow in slows]
    np.testing.assert_array_equal(result.evicted_at_NLGT[n], evicted_at)
    np.testing.assert_array_equal(result.num_evicted_NLG[n], (np.array(evicted_at) < NEVER).sum(-1))
    np.testing.assert_array_equal(result.held_NLGR[n], [slow.held_GR for slow in slows])
    positions = range(result.first_row, case.num_rows)
    window = case.layer.window or case.num_rows
    np.testing.assert_array_equal(result.full_R, [min(t + 1, window) for t in positions])
    close(result.mass_kept_NLHR[n], [slow.mass_HR for slow in slows])
    errors = [((slow.output_HRD - slow.full_HRD) ** 2).sum(-1) for slow in slows]
    close(result.error_sq_NLHR[n], errors, size**2)
    close(result.norm_sq_LHR, [(slow.full_HRD**2).sum(-1) for slow in slows], size**2)
    norms = [np.linalg.norm([slow.output_HRD, slow.full_HRD], axis=-1) for slow in slows]
    dots = [(slow.output_HRD * slow.full_HRD).sum(-1) for slow in slows]
    lengths = np.array([one.prod(0) for one in norms])
    # Cosines of outputs that nearly cancelled have no digits to compare.
    close(result.cosine_NLHR[n] * lengths, dots, size**2)
    assert result.is_clipped_N[n] == any(slow.is_clipped for slow in slows)
    assert result.is_clamped_N[n] == any(slow.is_clamped for slow in slows)
