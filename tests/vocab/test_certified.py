"""Proofs hold: what is called certain is in the set, and the bounds are those of the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_clusters as slow
from tests.vocab.cases import Case, make_case
from tracekit.errors import UsageError
from tracekit.measure.clusters import cluster_rows
from tracekit.measure.head import Head
from tracekit.vocab.blocks import blocks
from tracekit.vocab.checks.certified import MARGIN, SEED, Certified, CertifiedLowRank
from tracekit.vocab.controllers.fixed import Fixed
from tracekit.vocab.coverage import Prefixes
from tracekit.vocab.estimators.clustered import Clustered
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.random import Random
from tracekit.vocab.scheme import Scheme, parse_scheme
from tracekit.vocab.truth import Truth
from tracekit.vocab.view import View

if TYPE_CHECKING:
    from tracekit.vocab.check import Check
    from tracekit.vocab.estimator import Estimator

SIZES = [1, 2, 4, 8, 15, 22]
RULES = ("argmax", "minp")
HIT = {"argmax": "hit_argmax", "minp": "hit_min_p"}
SEEDS = st.integers(0, 10**6)

Rule = Literal["argmax", "minp"]
CHECKS = st.one_of(
    st.builds(Certified, lists=st.integers(1, 30), rule=st.sampled_from(RULES)),
    st.builds(CertifiedLowRank, rank=st.integers(1, 8), rule=st.sampled_from(RULES)),
)


def lumpy(case: Case, seed: int, noise: float, dtype: torch.dtype) -> Case:
    """Return a case whose rows lie in a few lumps, so that bounds are tight enough to prove."""
    rng = torch.Generator().manual_seed(seed)
    width, size = case.head.weight_VE.shape
    center_JE = torch.randn(4, size, generator=rng)
    weight_VE = center_JE[torch.randint(4, (width,), generator=rng)]
    weight_VE = weight_VE + noise * torch.randn(width, size, generator=rng)
    bias_V = case.head.bias_V
    if bias_V is not None:
        bias_V = bias_V.to(dtype)
        bias_V[:5] = -torch.inf
    return case.but(head=Head(weight_VE.to(dtype), bias_V, case.head.spec))


def shaped(case: Case, scale: float, softcap: float | None) -> Case:
    """Return a case whose head has a scale and a soft-cap."""
    spec = replace(case.head.spec, scale=scale, softcap=softcap)
    return case.but(head=Head(case.head.weight_VE, case.head.bias_V, spec))


def certain(case: Case, estimator: Estimator, check: Check) -> tuple[np.ndarray, dict[str, Any]]:
    """Return where sets are certain, bool [S, N], and what they cover by themselves."""
    plain, checked = case.tried(
        [Scheme(estimator, Fixed()), Scheme(estimator, Fixed(), check)], SIZES
    )
    return ~checked.columns["is_fallback"], plain.columns


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    CHECKS,
    st.sampled_from([Oracle(), LowRank(rank=2), Clustered(lists=4), Random()]),
    st.sampled_from([0.0, 1e-7, 1e-3, 0.1, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([(1.0, None), (0.1, None), (3.0, 2.0), (1e-3, 30.0)]),
    st.booleans(),
    st.sampled_from([1e-20, 0.0, 1.0, 30.0]),
)
def test_what_is_certain_is_in_the_set(
    seed: int,
    check: Any,
    estimator: Estimator,
    noise: float,
    dtype: torch.dtype,
    shape: tuple[float, float | None],
    has_bias: bool,
    length: float,
) -> None:
    case = lumpy(make_case(seed, has_bias=has_bias), seed, noise, dtype)
    case = shaped(case.but(own=case.own.but(hidden_TE=case.hidden_TE * length)), *shape)
    is_certain_SN, columns = certain(case, estimator, check)
    assert columns[HIT[check.rule]][is_certain_SN].all()
    assert columns["hit_argmax"][is_certain_SN].all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [Certified, CertifiedLowRank])
def test_a_proof_is_found_where_rows_lie_close_together(kind: Any, rule: Rule) -> None:
    case = lumpy(make_case(1, width=40), 1, 1e-3, torch.float32)
    case = case.but(own=case.own.but(hidden_TE=case.hidden_TE * 4))
    is_certain_SN, columns = certain(case, Clustered(lists=4), kind(4, rule=rule))
    assert is_certain_SN[:, -1].any()
    assert not is_certain_SN.all()
    assert columns[HIT[rule]][is_certain_SN].all()


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 30), st.sampled_from(RULES), st.booleans(), st.floats(0, 1))
def test_clusters_are_bounded_as_the_formula_says(
    seed: int, num: int, rule: Rule, has_bias: bool, noise: float
) -> None:
    case = lumpy(make_case(seed, has_bias=has_bias), seed, noise, torch.float32)
    rows = case.head.weight_VE.tolist()
    bias = None if case.head.bias_V is None else case.head.bias_V.tolist()
    lists = slow.groups(cluster_rows(case.head.weight_VE, num, SEED).cluster_V.tolist())

    def bound(row: int, inside: set[int]) -> float:
        return slow.cluster_bound(rows, bias, case.hidden_TE[row].tolist(), lists, inside)

    assert_decides_by(case, Certified(num, rule), bound)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 8), st.sampled_from(RULES), st.floats(0, 1))
def test_tokens_are_bounded_by_what_a_low_rank_leaves(
    seed: int, rank: int, rule: Rule, noise: float
) -> None:
    case = lumpy(make_case(seed), seed, noise, torch.float32)
    rows = case.head.weight_VE.double().numpy()
    axes = np.linalg.svd(rows)[2][:rank].T

    def bound(row: int, inside: set[int]) -> float:
        outside = [i for i in range(len(rows)) if i not in inside]
        return slow.lowrank_bound(rows, case.hidden_TE[row].double().numpy(), axes, outside)

    assert_decides_by(case, CertifiedLowRank(rank, rule), bound)


def assert_decides_by(case: Case, check: Any, bound: Any) -> None:
    """Assert that a check is sure exactly where a slow bound is below what matters."""
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=0)
    truth = Truth.of(block.logits_SV, block.chosen_S)
    ids_SK = Random().ranking(View(block.known, Random().needs, "", {}), case.width)
    prefixes = Prefixes.of(truth, ids_SK, block.known.decoder.pinned_P, case.width)
    count_SN = prefixes.counts(torch.tensor(SIZES).expand(len(ids_SK), -1))
    scored = prefixes.scored(count_SN)
    sure_SN = check.is_sure(View(block.known, check.needs, check.text, {}), scored).tolist()
    pinned = set(scored.pinned_P.tolist())
    for step, row in enumerate(case.scored_S.tolist()):
        ranked = scored.ids_SK[step].tolist()
        for place, count in enumerate(count_SN[step].tolist()):
            inside = pinned | set(ranked[:count])
            gap = float(scored.best_SN[step, place]) + MARGIN[check.rule] - bound(row, inside)
            if abs(gap) > 1e-4:
                assert sure_SN[step][place] == (gap > 0)


def test_a_set_of_all_tokens_is_certain_and_an_empty_one_is_not() -> None:
    case = make_case(4, num_pinned=0)
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=0)
    truth = Truth.of(block.logits_SV, block.chosen_S)
    ids_SK = torch.arange(23).expand(len(block.chosen_S), -1)
    prefixes = Prefixes.of(truth, ids_SK, block.known.decoder.pinned_P, 23)
    scored = prefixes.scored(torch.tensor([[0, 23]]).expand(len(ids_SK), -1))
    for check in (Certified(3), CertifiedLowRank(2)):
        view = View(block.known, check.needs, check.text, {})
        assert check.is_sure(view, scored).tolist() == [[False, True]] * len(ids_SK)


def test_all_tokens_alike_are_never_certain() -> None:
    case = make_case(5, spread=0.0)
    for check in (Certified(3), CertifiedLowRank(2)):
        assert not certain(case, Oracle(), check)[0][:, :-1].any()


def test_a_copy_of_full_rank_proves_almost_every_step() -> None:
    case = make_case(6)
    is_certain_SN, columns = certain(case, Random(), CertifiedLowRank(6))
    assert (is_certain_SN == columns["hit_argmax"]).all()


def test_costs_are_those_of_the_formulas() -> None:
    case = make_case(7, has_bias=True)
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=0)
    checks: tuple[Check, ...] = (Certified(4), Certified(99), CertifiedLowRank(2))
    costs = [one.cost(View(block.known, one.needs, one.text, {})) for one in checks]
    assert [one.macs for one in costs] == [4 * 7, 23 * 7, 2 * (12 + 23) + 23]
    assert [one.bytes for one in costs] == [4 * 8 * 4, 23 * 8 * 4, (2 * 29 + 23 * 2) * 4]


def test_checks_are_named_in_a_scheme_and_refuse_what_makes_no_sense() -> None:
    scheme = parse_scheme("oracle@certified:lists=9,rule=minp")
    assert scheme.text == "oracle@certified:lists=9,rule=minp"
    assert parse_scheme("oracle@certified-lowrank").check == CertifiedLowRank()
    for text in ("certified:lists=0", "certified:rule=best", "certified-lowrank:rank=0"):
        with pytest.raises(UsageError):
            parse_scheme(f"oracle@{text}")
