"""Small random stacks of layers for the KV engine, the engine and its slow twin run on them."""

from __future__ import annotations

import atexit
import importlib
import json
import shutil
import tempfile
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests import oracles, oracles_budgets
from tracekit.kv.allotment import Allotment
from tracekit.kv.amounts import parse_kept
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS, Cache
from tracekit.kv.engine import NEVER, Engine
from tracekit.kv.parse import parse
from tracekit.kv.plan import make_shares, observe
from tracekit.kv.reference import Reference
from tracekit.kv.replay import Family, Setting, replay
from tracekit.kv.schedule import Spans
from tracekit.spec import LayerSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracekit.kv.budget import LayerBudget
    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay

SEED = 7

_MODULES = [
    importlib.import_module(f"tests.kv.twins.{path.stem}")
    for path in sorted((Path(__file__).parent / "twins").glob("*.py"))
]
TWINS: dict[str, Callable[[Any], oracles.SlowScore]] = {
    name: twin for module in _MODULES for name, twin in module.TWINS.items()
}
"""By preset: from its scorer to the slow version of its score."""

TEXTS: list[str] = [text for module in _MODULES for text in module.TEXTS]
"""Policies that are run beside their twin."""


NUM_PROBES = 3

ROPE = RopeSpec(kind="default", theta=10_000.0, inv_freq=(1.0,), layout="halves")


@dataclass(frozen=True)
class Case:
    """Recorded rows of a stack of layers (numpy, float64)."""

    layer: LayerSpec
    query_LHTD: np.ndarray
    key_LGTD: np.ndarray
    value_LGTD: np.ndarray
    rope: RopeSpec | None = ROPE
    influence_LPHTD: np.ndarray | None = None

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
    def gradients(self) -> np.ndarray:
        """Influence of all rows, [L, P, H, T, D]; P = 0 without probes."""
        if self.influence_LPHTD is not None:
            return self.influence_LPHTD
        return np.zeros((len(self.layers), 0, *self.query_LHTD.shape[1:3], self.layer.value_dim))

    @property
    def reference(self) -> Reference:
        return self.reference_in(torch.float64)

    def reference_in(self, dtype: torch.dtype) -> Reference:
        names = ("query_LHTD", "key_LGTD", "value_LGTD")
        tensors = dict(zip(names, self.rows(0, self.num_rows, dtype), strict=True))
        return Reference(
            **tensors,
            layer=self.layer,
            rope=self.rope,
            influence_LPHRD=torch.tensor(self.gradients).to(dtype),
        )

    @property
    def cache(self) -> Cache:
        """The layers of the stack as if they were all layers of a model."""
        return Cache(tuple(replace(self.layer, index=index) for index in self.layers))

    def setting(self, point: int, **ends: Any) -> Setting:
        """Return the setting in which the prompt ends at ``point``."""
        spans = self.spans(**{"prompt_end": point, **ends})
        return Setting(layers=tuple(self.layers), cache=self.cache, spans=spans, seed=SEED)

    def rows(
        self, start: int, end: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = (torch.tensor(a[:, :, start:end]).to(dtype) for a in self.arrays)
        return query, key, value

    def rounded(self, dtype: torch.dtype) -> Case:
        """Return the case that a type can hold exactly."""
        arrays = (a.double().numpy() for a in self.rows(0, self.num_rows, dtype))
        influence = torch.tensor(self.gradients).to(dtype).double().numpy()
        return Case(self.layer, *arrays, rope=self.rope, influence_LPHTD=influence)

    def part(self, at: int) -> Case:
        """Return the case of one layer alone."""
        arrays = (array[at : at + 1] for array in self.arrays)
        influence = self.gradients[at : at + 1]
        return Case(self.layer, *arrays, rope=self.rope, influence_LPHTD=influence)

    def with_noise_from(self, row: int) -> Case:
        """Return the case with queries, keys and values from a row on replaced by noise."""
        draw = np.random.default_rng(row)
        arrays = [array.copy() for array in self.arrays]
        for array in arrays:
            array[:, :, row:] = 5 * draw.normal(size=array[:, :, row:].shape)
        return Case(self.layer, *arrays, rope=self.rope, influence_LPHTD=self.influence_LPHTD)

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
    rows_of = ((np.round(array) if whole else array) for array in arrays)
    influence = draw.normal(size=(layers, NUM_PROBES, heads, rows, size))
    return Case(layer, *rows_of, rope=ROPE if size > 1 else None, influence_LPHTD=influence)


@st.composite
def cases(draw: st.DrawFn, *, min_rows: int = 1) -> Case:
    """Draw a case: heads, groups, lengths, ties, extreme values, windows, sinks, soft-caps."""
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sinks = draw(st.none() | st.lists(st.floats(-5, 5), min_size=9, max_size=9))
    return make_case(
        layers=draw(st.integers(1, 2)),
        groups=groups,
        group_size=group_size,
        rows=draw(st.integers(min_rows, 64)),
        size=draw(st.sampled_from([1, 2, 4])),
        seed=draw(st.integers(0, 2**32)),
        spread=draw(st.sampled_from([0.0, 1.0, 1.0, 30.0])),
        whole=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.just(5.0)),
        sinks=None if sinks is None else tuple(sinks[: groups * group_size]),
    )


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


@cache
def head_file(num_layers: int, num_heads: int) -> str:
    """Return the path of a file with a number for each layer and head, some of them 0 and equal."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = Path(folder) / "heads.json"
    numbers = [[(3 * at + 2 * g) % 5 / 4 for g in range(num_heads)] for at in range(num_layers)]
    numbers[-1][-1] = 1.0
    path.write_text(json.dumps(numbers))
    return str(path)


def with_file(budget: LayerBudget, case: Case) -> LayerBudget:
    """Return a budget with a file that fits the case, if it reads one and none is named."""
    if "file" not in {one.name for one in fields(budget)}:
        return budget
    return replace(budget, file=head_file(len(case.layers), case.layer.num_kv_heads))


def shares_of(
    case: Case, policies: Sequence[Policy], point: int, reference: Reference
) -> tuple[tuple[torch.Tensor, ...], ...] | None:
    """Return the plan of a family, made from this stack alone."""
    setting, first = case.setting(point), policies[0]
    first = replace(first, layers=with_file(first.layers, case))
    return make_shares([first, *policies[1:]], [observe(first, reference, setting)], setting)


def run_family(
    case: Case, policies: Sequence[Policy], point: int, reference: Reference | None = None
) -> Replay | None:
    """Replay one family with the prompt's end at ``point``."""
    reference = reference or case.reference
    family = Family(tuple(policies), shares_of(case, policies, point, reference))
    return replay([family], reference, case.setting(point))[0]


@dataclass(frozen=True)
class Run:
    """What an engine did, row by row: outputs [N, L, H, R, D] and held keys around decisions."""

    engine: Engine
    output_NLHRD: torch.Tensor
    decisions: list[tuple[int, torch.Tensor, torch.Tensor]]


def allot(
    case: Case, policies: Sequence[Policy], point: int, dtype: torch.dtype = torch.float64
) -> Allotment:
    """Return the entries of each layer and head, planned at ``point``."""
    shares = shares_of(case, policies, point, case.reference_in(dtype))
    return Allotment(case.cache, [one.kept for one in policies], shares)


def make_engine(case: Case, policies: Sequence[Policy], **more: Any) -> Engine:
    """Return an engine in which all layers and heads have the same budget, unless one is given."""
    allotment = Allotment(case.cache, [one.kept for one in policies])
    future = case.reference.future
    usual = {"allotment": allotment, "seed": SEED, "rope": case.rope, "future": future}
    return Engine(case.layer, case.layers, policies, **{**usual, **more})


def run_rows(
    case: Case, policies: Sequence[Policy], point: int, dtype: torch.dtype = torch.float64
) -> Run:
    """Call the engine one row at a time."""
    future, allotment = case.reference_in(dtype).future, allot(case, policies, point, dtype)
    engine = make_engine(case, policies, future=future, allotment=allotment)
    due = policies[0].schedule.decisions(point, case.spans())
    outputs, decisions = [], []
    for t in range(case.num_rows):
        if t in due:
            before = engine.held_NLGK.clone()
            engine.decide()
            decisions.append((t, before, engine.held_NLGK.clone()))
        row = case.rows(t, t + 1, dtype)
        if t < min(due, default=point):
            engine.absorb(*row)
            continue
        read = [output for output, _ in engine.read(*row)]
        outputs += read if t >= point else []
    return Run(engine, torch.cat(outputs, dim=-2), decisions)


def assert_kept_sets_shrink_to_the_budget(
    case: Case, policies: Sequence[Policy], point: int
) -> None:
    """Law 2: each layer holds min(its budget, available), no head is empty, bytes are uniform's.

    Where heads do not share, each of them holds at least min(its budget, available).
    """
    for part in Family(tuple(policies)).parts():
        allotment = allot(case, part.policies, point)
        for t, before_NLGK, after_NLGK in run_rows(case, part.policies, point).decisions:
            assert not (after_NLGK & ~before_NLGK).any()
            budget_NLG = allotment.entries(t, case.layers)
            _assert_holds_the_smaller(part.policies, budget_NLG, before_NLGK, after_NLGK)
            for policy, budget_LG in zip(part.policies, budget_NLG, strict=True):
                usable = budget_LG.clamp(max=case.layer.entries(t)).sum()
                uniform = case.cache.num_bytes(max(1, policy.kept.of(t)), t)
                assert int(usable) * case.cache.entry_bytes_L[0] == uniform


def _assert_holds_the_smaller(
    policies: Sequence[Policy],
    budget_NLG: torch.Tensor,
    before_NLGK: torch.Tensor,
    after_NLGK: torch.Tensor,
) -> None:
    num_before, num_after = before_NLGK.sum(-1), after_NLGK.sum(-1)
    assert (num_after >= 1).all()
    assert torch.equal(num_after.sum(-1), budget_NLG.sum(-1).minimum(num_before.sum(-1)))
    if policies[0].heads.is_uniform:
        assert (num_after >= budget_NLG.minimum(num_before)).all()


@dataclass(frozen=True)
class SlowRun:
    """What the twin did on one layer; scored rows last, or last but one."""

    output_HRD: np.ndarray
    full_HRD: np.ndarray
    held_GR: np.ndarray
    kl_HR: np.ndarray
    mass_HR: np.ndarray
    evicted_at_GT: np.ndarray
    influence_GPR: np.ndarray
    is_clipped: bool
    is_clamped: bool


def slow_shares(case: Case, policy: Policy, point: int) -> oracles_budgets.Shares | None:
    """Return the twin's plan over all layers of the stack, which have seen ``point`` rows."""
    if policy.layers.is_uniform:
        return None
    layers = []
    for at, layer in enumerate(case.cache.layers):
        slow = oracles.SlowLayer(layer, *(array[at] for array in case.arrays))
        slow.seen = point
        slow.held = [set(range(point)[-(layer.window or point) :]) for _ in slow.held]
        layers.append(slow)
    budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, point))
    plan = oracles_budgets.PLANS[LAYER_BUDGETS.name_of(type(policy.layers))]
    return plan(with_file(policy.layers, case), layers, budget)


def run_slow(case: Case, at: int, policy: Policy, point: int) -> SlowRun:
    """Run the twin on layer number ``at`` of the stack."""
    layer = replace(case.layer, index=case.layers[at])
    gradient_PHTD = case.gradients[at]
    slow = oracles.SlowLayer(
        layer, *(array[at] for array in case.arrays), influence_PHTD=gradient_PHTD
    )
    scores, protection = TWINS[policy.name](policy.scorer), policy.protection
    share = oracles_budgets.HEADS[HEAD_BUDGETS.name_of(type(policy.heads))](policy.heads)
    due = policy.schedule.decisions(point, case.spans())
    shares = slow_shares(case, policy, min(due)) if due else None
    outputs, fulls, held, masses, kls, clamped = [], [], [], [], [], False
    for t in range(case.num_rows):
        if t in due:
            budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, t))
            budgets = [budget] * layer.num_kv_heads
            if shares is not None:
                budgets = oracles_budgets.share_out(shares, budget, case.cache.layers, t)[at]
            recent = protection.recent
            newest = [oracles.entries(recent.amount, recent.unit, one) for one in budgets]
            newest = [max(one, protection.grace) for one in newest]
            clamped |= any(one > min(t, layer.window or t) for one in budgets)
            slow.decide(scores, budgets, protection.sinks, newest, share)
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
        kls.append([oracles.row_kl(*rows) for rows in zip(slow.log[t], weights, strict=True)])
    deltas_HRD = np.array(outputs).swapaxes(0, 1) - np.array(fulls).swapaxes(0, 1)
    return SlowRun(
        output_HRD=np.array(outputs).swapaxes(0, 1),
        full_HRD=np.array(fulls).swapaxes(0, 1),
        held_GR=np.array(held).T,
        mass_HR=np.array(masses).T,
        kl_HR=np.array(kls).T,
        influence_GPR=oracles.influence(slow, deltas_HRD, point),
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
    found, size = result.measures, 1 + np.abs(case.value_LGTD).max()

    def close(values: np.ndarray, true: list[np.ndarray], scale: float = 1.0) -> None:
        np.testing.assert_allclose(values / scale, np.array(true) / scale, atol=atol, rtol=0)

    evicted_at = [slow.evicted_at_GT for slow in slows]
    np.testing.assert_array_equal(result.evicted_at_NLGT[n], evicted_at)
    np.testing.assert_array_equal(result.num_evicted_NLG[n], (np.array(evicted_at) < NEVER).sum(-1))
    for held_NLGR in (found.held_NLGR, found.read_NLGR):
        np.testing.assert_array_equal(held_NLGR[n], [slow.held_GR for slow in slows])
    positions = range(result.first_row, case.num_rows)
    window = case.layer.window or case.num_rows
    np.testing.assert_array_equal(result.full_R, [min(t + 1, window) for t in positions])
    close(found.mass_kept_NLHR[n], [slow.mass_HR for slow in slows])
    # Where nearly nothing was kept, the logarithm of the mass has fewer digits than the mass.
    mass, kl = found.mass_kept_NLHR[n], np.array([slow.kl_HR for slow in slows])
    np.testing.assert_allclose(
        np.where(mass > 1e-3, found.row_kl_NLHR[n], kl), kl, atol=1e3 * atol, rtol=0
    )
    errors = [((slow.output_HRD - slow.full_HRD) ** 2).sum(-1) for slow in slows]
    close(found.error_sq_NLHR[n], errors, size**2)
    close(found.norm_sq_LHR, [(slow.full_HRD**2).sum(-1) for slow in slows], size**2)
    norms = [np.linalg.norm([slow.output_HRD, slow.full_HRD], axis=-1) for slow in slows]
    dots = [(slow.output_HRD * slow.full_HRD).sum(-1) for slow in slows]
    lengths = np.array([one.prod(0) for one in norms])
    # Cosines of outputs that nearly cancelled have no digits to compare.
    close(found.cosine_NLHR[n] * lengths, dots, size**2)
    gradient = 1 + np.abs(case.gradients).max(initial=0)
    effects = [slow.influence_GPR for slow in slows]
    close(found.influence_NLGPR[n], effects, size * gradient * case.layer.value_dim)
    assert result.is_clipped_N[n] == any(slow.is_clipped for slow in slows)
    assert result.is_clamped_N[n] == any(slow.is_clamped for slow in slows)
