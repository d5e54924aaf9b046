"""What every estimator, controller and check keeps to, whoever wrote it: one suite over registries.

A new file is tested here with its default parameters and with small ones, on all cases; ``-k NAME``
runs what is named so.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

import numpy as np
import pytest
import torch

from tests.vocab.cases import NUM_LAYERS, OWN, Case, make_case, with_masked
from tracekit.errors import UsageError
from tracekit.measure.head import Head
from tracekit.parameters import make, split
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.blocks import blocks
from tracekit.vocab.check import CHECKS
from tracekit.vocab.controller import CONTROLLERS, Run, weights
from tracekit.vocab.coverage import Prefixes
from tracekit.vocab.estimator import (
    ESTIMATORS,
    CausalEstimator,
    Cost,
    Estimator,
    HindsightEstimator,
)
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.layers import LayerChoice
from tracekit.vocab.scheme import parse_scheme
from tracekit.vocab.truth import Truth
from tracekit.vocab.view import Needs, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracekit.registry import Registry
    from tracekit.vocab.check import Check
    from tracekit.vocab.controller import Controller
    from tracekit.vocab.engine import Tried


def with_all(kind: Any, value: int) -> Any:
    """Return an instance all of whose whole-number parameters have one value."""
    hints = get_type_hints(kind)
    return kind(**{one.name: value for one in fields(kind) if hints[one.name] is int})


def choices_of(kind: Any) -> Iterator[Any]:
    """Yield an instance for each value of a parameter that has few."""
    for one in fields(kind):
        for value in get_args(get_type_hints(kind)[one.name]):
            yield kind(**{one.name: value})


def variants(registry: Registry[Any]) -> dict[str, Any]:
    """Return each entry as it is by default and with small parameters, once each.

    On a small case a default is often the whole vocabulary or the whole rank.
    """
    kinds = [registry.get(name) for name in registry.names()]
    found = [
        one
        for kind in kinds
        for one in (kind(), with_all(kind, 1), with_all(kind, 3), *choices_of(kind))
    ]
    return {one.text: one for one in found}


def unions(few: tuple[str, ...]) -> dict[str, Estimator]:
    """Return all pairs of a few, and each estimator with one of them."""
    texts = ["+".join(pair) for pair in itertools.permutations(few, 2)]
    texts += [f"{name}+{few[0]}" for name in ESTIMATORS.names()]
    found = (parse_scheme(text).estimator for text in texts)
    return {one.text: one for one in found}


SINGLE: dict[str, Estimator] = variants(ESTIMATORS)
UNIONS = unions(("previous:top=3", "lowrank:rank=2", "frequency", "oracle"))
ALL = SINGLE | UNIONS
CAUSAL = {text: one for text, one in ALL.items() if one.causal}
LIMITS = (1, 2, 5, 11, 22)
SIZES = (1, 3, 8, 15, 23, 24, 10_000)


def masked() -> Case:
    """Return a case whose bias forbids some tokens."""
    return with_masked(make_case(5, has_bias=True), [0, 1, 5])


def half() -> Case:
    case = make_case(6)
    head = Head(case.head.weight_VE.bfloat16(), None, case.head.spec)
    states = {
        "hidden_TE": case.hidden_TE.bfloat16(),
        "residual_LTE": case.own.residual_LTE.bfloat16(),
    }
    rest = tuple(one.but(hidden_TE=one.hidden_TE.bfloat16()) for one in case.rest)
    embedding_VE = case.embedding_VE.bfloat16()
    return case.but(head=head, own=case.own.but(**states), rest=rest, embedding_VE=embedding_VE)


CASES: dict[str, Callable[[], Case]] = {
    "plain": make_case,
    "biased": lambda: make_case(1, has_bias=True),
    "equal logits": lambda: make_case(2, spread=0.0),
    "steps with gaps": lambda: make_case(3, scored=[0, 2, 3, 7]),
    "one step": lambda: make_case(4, scored=[5]),
    "masked tokens": masked,
    "half precision": half,
    "one token": lambda: make_case(7, width=1, num_pinned=0),
    "all tokens pinned": lambda: make_case(8, num_pinned=23),
}


@cache
def case_of(kind: str) -> Case:
    """Return a case, whose head and corpus keep what estimators made of them."""
    return CASES[kind]()


@cache
def tried_of(estimator: Estimator, kind: str) -> Tried:
    """Return what an estimator covers in a case, at ``SIZES``."""
    (tried,) = case_of(kind).tried_fixed([estimator], list(SIZES))
    return tried


every_single = pytest.mark.parametrize("estimator", SINGLE.values(), ids=SINGLE)
every_estimator = pytest.mark.parametrize("estimator", ALL.values(), ids=ALL)
every_causal = pytest.mark.parametrize("estimator", CAUSAL.values(), ids=CAUSAL)
every_case = pytest.mark.parametrize("kind", CASES)
# What a union adds to its members does not hang on the numbers.
estimators_in_cases = pytest.mark.parametrize(
    ("estimator", "kind"),
    [
        pytest.param(one, kind, id=f"{text}-{kind}")
        for some, kinds in ((SINGLE, CASES), (UNIONS, ("steps with gaps", "one token")))
        for text, one in some.items()
        for kind in kinds
    ],
)


@every_single
def test_an_estimator_is_of_one_of_the_two_kinds_and_says_what_it_is(estimator: Estimator) -> None:
    kind = CausalEstimator if estimator.causal else HindsightEstimator
    assert isinstance(estimator, kind)
    assert type(estimator).__doc__
    assert ESTIMATORS.get(estimator.name) is type(estimator)


def others_of(part: Any) -> Iterator[Any]:
    """Yield the part with one parameter changed, in all ways that it takes."""
    for one in fields(part):
        hint, value = get_type_hints(type(part))[one.name], getattr(part, one.name)
        choices: tuple[Any, ...] = get_args(hint)
        if hint is LayerChoice:
            choices = LayerChoice.parse("0"), LayerChoice.parse("last2")
        elif not choices:
            choices = (value + 1, value + 7) if hint is int else (value / 2, value + 0.25)
        for other in choices:
            if other == value:
                continue
            try:
                yield replace(part, **{one.name: other})
            except UsageError:
                continue


REGISTRIES: dict[str, Registry[Any]] = {
    "estimator": ESTIMATORS,
    "controller": CONTROLLERS,
    "check": CHECKS,
}
PARTS = {
    f"{kind} {text}": (registry, one)
    for kind, registry in REGISTRIES.items()
    for text, one in variants(registry).items()
}


@pytest.mark.parametrize(("registry", "part"), PARTS.values(), ids=PARTS)
def test_text_is_an_identity_that_parses_back(registry: Registry[Any], part: Any) -> None:
    def parsed(text: str) -> Any:
        name, _, rest = text.partition(":")
        return make(registry.get(name), split(rest))

    assert parsed(part.text) == part
    assert parsed(part.text).text == part.text
    for other in others_of(part):
        assert other.text != part.text
        assert parsed(other.text) == other


def test_no_name_is_that_of_a_controller_and_of_a_check() -> None:
    assert not set(CONTROLLERS.names()) & set(CHECKS.names())


@estimators_in_cases
def test_rankings_hold_distinct_tokens_and_shorter_ones_are_prefixes(
    estimator: Estimator, kind: str
) -> None:
    case = case_of(kind)
    large = case.candidates(estimator, case.width)
    assert len(large) == len(case.scored_S)
    for row in large:
        assert len(row) == len(set(row)) <= case.width
        assert all(0 <= i < case.width for i in row)
    for limit in LIMITS:
        assert case.candidates(estimator, min(limit, case.width)) == [row[:limit] for row in large]


@every_estimator
@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_steps_change_no_ranking_and_no_cost(
    estimator: Estimator, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_blocks_change_nothing(estimator, rows, monkeypatch)


def assert_blocks_change_nothing(
    estimator: Estimator, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(2, scored=[2, 3, 6, 7, 8])
    whole, (cell,) = case.candidates(estimator, 23), case.evaluate([estimator], [5])
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", rows * case.width)
    assert case.candidates(estimator, 23) == whole
    (again,) = case.evaluate([estimator], [5])
    for name in ("bytes", "macs"):
        assert again[name] == pytest.approx(cell[name], rel=1e-6)


def noise_after(case: Case, row: int, estimator: Estimator, rng: torch.Generator) -> Case:
    """Return the case with noise in place of all that a step at a row may not know.

    Its own hidden state is the input of its head; that, its attention row and its layer states may
    count only where they were declared.
    """
    own = case.own
    needs = [part.needs for part in estimator.parts]
    hidden_TE = own.hidden_TE.clone()
    first = row + any(one.hidden for one in needs)
    hidden_TE[first:] = torch.randn(hidden_TE[first:].shape, generator=rng) * 3
    residual_LTE = own.residual_LTE.clone()
    read = {one.residual % NUM_LAYERS for one in needs if one.residual is not None}
    attention_LHTT = own.attention_LHTT.clone()
    attended = {
        layer
        for one in needs
        if one.attention is not None
        for layer in one.attention.numbers(NUM_LAYERS)
    }
    fresh = make_case(int(torch.randint(10**6, (1,), generator=rng))).own
    for layer in range(NUM_LAYERS):
        first = row + (layer in read)
        residual_LTE[layer, first:] = torch.randn(residual_LTE[layer, first:].shape, generator=rng)
        first = row + (layer in attended)
        attention_LHTT[layer, :, first:] = fresh.attention_LHTT[layer, :, first:]
    ids_T = own.token_ids_T.clone()
    ids_T[row + 1 :] = torch.randint(case.width, (len(ids_T) - row - 1,), generator=rng)
    return case.but(
        own=own.but(
            hidden_TE=hidden_TE,
            token_ids_T=ids_T,
            attention_LHTT=attention_LHTT,
            residual_LTE=residual_LTE,
        )
    )


def assert_no_look_ahead(estimator: Estimator, case: Case) -> None:
    """Fail if what comes after a step changes a candidate of it or of an earlier step.

    The own prompt's text in the trace is changed too.
    """
    before = case.candidates(estimator, case.width)
    rng = torch.Generator().manual_seed(1)
    for step, row in enumerate(case.scored_S.tolist()):
        other = noise_after(case, row, estimator, rng)
        assert other.candidates(estimator, case.width)[: step + 1] == before[: step + 1]


@every_causal
@pytest.mark.parametrize("scored", [None, [0, 2, 3, 7], [5]], ids=["all", "gaps", "one"])
@pytest.mark.parametrize("block", [1, 1 << 20], ids=["single", "block"])
def test_no_candidate_up_to_a_step_depends_on_what_comes_after(
    estimator: Estimator,
    scored: list[int] | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", block)
    assert_no_look_ahead(estimator, make_case(3, scored=scored))


@every_causal
def test_no_causal_candidate_depends_on_the_logits_of_its_own_step(estimator: Estimator) -> None:
    case = make_case(4)
    num_top = max(part.needs.previous for part in estimator.parts)
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=num_top)
    none_SV = torch.full_like(block.logits_SV, torch.nan)
    ids_SK, none_SK = (
        estimator.candidates(block.known, {}, logits_SV, 20)
        for logits_SV in (block.logits_SV, none_SV)
    )
    assert torch.equal(ids_SK, none_SK)


@every_causal
def test_what_the_trace_holds_of_the_own_prompt_changes_nothing(estimator: Estimator) -> None:
    case = make_case(9)
    loud = make_case(99, num_rows=30)
    texts = loud.own.but(domain="other"), loud.rest[0].but(prompt_id=OWN)
    others = case.but(own=texts[0], rest=(*case.rest, texts[1])).others
    others = replace(others, domain=case.own.domain)
    assert case.candidates(estimator, 23, others) == case.candidates(estimator, 23)


def test_estimators_side_by_side_give_what_they_give_alone() -> None:
    case = make_case(10)
    together = case.evaluate(list(ALL.values()), [2, 8])
    alone = [
        cell
        for one in ALL.values()
        for cell in case.but(head=replace(case.head)).evaluate([one], [2, 8])
    ]
    assert together == alone


@every_causal
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 20.0])
def test_at_every_step_and_size_the_oracle_covers_no_less(
    estimator: Estimator, spread: float
) -> None:
    case = make_case(int(spread * 10), spread=spread)
    sizes = [1, 2, 5, 10, 20]
    best, mine = (one.columns for one in case.tried_fixed([Oracle(), estimator], sizes))
    assert (mine["missing_mass"] >= best["missing_mass"] - 1e-12).all()
    assert (mine["neg_log_mass_nats"] >= best["neg_log_mass_nats"] - 1e-12).all()
    assert (mine["jsd_nats"] >= best["jsd_nats"] - 1e-12).all()
    assert best["hit_argmax"].all()
    for rule in ("hit_top_p", "hit_min_p", "hit_top_k"):
        assert not (mine[rule] & ~best[rule]).any()


GROWS = ("hit_chosen", "hit_argmax", "hit_top_k", "hit_top_p", "hit_min_p", "set_size")
SHRINKS = ("missing_mass", "neg_log_mass_nats", "jsd_nats")


@estimators_in_cases
def test_larger_sets_cover_no_less_and_cost_no_less(estimator: Estimator, kind: str) -> None:
    tried = tried_of(estimator, kind)
    for n, (small, large) in enumerate(itertools.pairwise(tried.cost_N)):
        assert 0 <= small.macs <= large.macs < np.inf
        assert 0 <= small.bytes <= large.bytes < np.inf
        for name in GROWS:
            values_SN = tried.columns[name]
            assert (values_SN[:, n] <= values_SN[:, n + 1]).all(), name
        for name in SHRINKS:
            values_SN = tried.columns[name]
            assert (values_SN[:, n] >= values_SN[:, n + 1] - 1e-12).all(), name


@estimators_in_cases
def test_a_set_holds_the_pinned_tokens_and_at_most_as_many_others_as_asked(
    estimator: Estimator, kind: str
) -> None:
    case, num_pinned = case_of(kind), len(case_of(kind).pinned_ids)
    size_SN = tried_of(estimator, kind).columns["set_size"]
    assert (size_SN >= num_pinned).all()
    assert (size_SN <= np.minimum(num_pinned + np.array(SIZES), case.width)).all()


@estimators_in_cases
def test_sizes_from_the_whole_vocabulary_on_are_the_full_head(
    estimator: Estimator, kind: str
) -> None:
    tried, is_whole_N = tried_of(estimator, kind), np.array(SIZES) >= case_of(kind).width
    of_whole = {name: values_SN[:, is_whole_N] for name, values_SN in tried.columns.items()}
    for name in ("hit_chosen", "hit_argmax", "hit_top_k", "hit_top_p", "hit_min_p"):
        assert of_whole[name].all()
    for name in (*SHRINKS, "backoff_kl_nats"):
        assert (of_whole[name] == 0).all(), name
    assert (of_whole["set_size"] == case_of(kind).width).all()
    np.testing.assert_array_equal(of_whole["nll_backoff"], of_whole["nll_full"])
    # There are no more candidates to name than tokens.
    assert (
        len({(tried.cost_N[n].macs, tried.cost_N[n].bytes) for n in np.flatnonzero(is_whole_N)})
        == 1
    )


@dataclass(frozen=True)
class Peek(CausalEstimator):
    """Base of estimators that break the rules: the suite has to see it."""

    name: ClassVar[str] = "peek"

    def cost(self, view: View, size: int) -> Cost:
        del view, size
        return Cost()


def turned(view: View, limit: int, shift: Any) -> torch.Tensor:
    """Return a ranking that hangs on one number."""
    return ((torch.arange(limit) + int(shift)) % limit).expand(view.num_steps, -1)


class PeekAtLaterStates(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(hidden=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return turned(view, limit, view.hidden_TE[-1].argmax())


class PeekAtLaterTokens(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(tokens=True)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return turned(view, limit, view.token_ids_T[-1])


class PeekAtLaterRuns(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(previous=4)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        *_, last_NM = view.previous_top()
        return last_NM[-1, :limit].expand(view.num_steps, -1)


class PeekAtLaterAttention(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(attention=LayerChoice.parse("last2"))

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return turned(view, limit, view.attention_SK()[-1].argmax())


class PeekAtLaterLayers(Peek):
    @property
    def needs(self) -> Needs:
        return Needs(residual=-1)

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return turned(view, limit, view.residual_SE()[-1].argmax())


class CountInBlock(Peek):
    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return torch.cat([turned(view, limit, step)[:1] for step in range(view.num_steps)])


PEEKS = (
    PeekAtLaterStates(),
    PeekAtLaterTokens(),
    PeekAtLaterRuns(),
    PeekAtLaterAttention(),
    PeekAtLaterLayers(),
)


@pytest.mark.parametrize("peek", PEEKS, ids=lambda one: type(one).__name__)
def test_the_suite_sees_an_estimator_that_reads_a_later_step_of_its_block(peek: Any) -> None:
    with pytest.raises(AssertionError):
        assert_no_look_ahead(peek, make_case(3))


def test_the_suite_sees_an_estimator_that_counts_the_steps_of_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AssertionError):
        assert_blocks_change_nothing(CountInBlock(), 2, monkeypatch)


CONTROLS: dict[str, Controller] = variants(CONTROLLERS)
every_controller = pytest.mark.parametrize("controller", CONTROLS.values(), ids=CONTROLS)


def random_runs(seed: int, num_runs: int = 40, size: int = 6) -> list[Run]:
    rng = np.random.default_rng(seed)
    values_R5 = np.abs(rng.normal(2, 1.5, (num_runs, 5)))
    hidden_RE = rng.normal(size=(num_runs, size)).astype(np.float32)
    return [
        Run._make([*row.tolist(), hidden_E])
        for row, hidden_E in zip(values_R5, hidden_RE, strict=True)
    ]


@every_controller
def test_a_weight_hangs_on_the_runs_before_its_step_alone(controller: Controller) -> None:
    runs, counts = random_runs(0), [0, 1, 2, 5, 9, 10, 30, 40]
    weight_S = weights(controller, runs, counts)
    for step, count in enumerate(counts):
        changed = runs[:count] + random_runs(1)[count:]
        again_S = weights(controller, changed, counts)
        np.testing.assert_array_equal(again_S[: step + 1], weight_S[: step + 1])
        # Nor on how many steps are to come.
        np.testing.assert_array_equal(
            weights(controller, runs, counts[: step + 1]), again_S[: step + 1]
        )


@every_controller
def test_a_controller_starts_every_sequence_anew(controller: Controller) -> None:
    runs, counts = random_runs(2), list(range(41))
    once_S = weights(controller, runs, counts)
    weights(controller, random_runs(3), counts)
    np.testing.assert_array_equal(weights(controller, runs, counts), once_S)


@every_controller
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e6])
def test_weights_stay_above_0_and_finite_whatever_the_state(
    controller: Controller, factor: float
) -> None:
    runs = [Run._make([value * np.float32(factor) for value in one]) for one in random_runs(4)]
    weight_S = weights(controller, runs, list(range(41)))
    assert (np.isfinite(weight_S) & (weight_S > 0)).all()


VERDICTS: dict[str, Check] = variants(CHECKS)
every_check = pytest.mark.parametrize("check", VERDICTS.values(), ids=VERDICTS)


def verdict(check: Check, case: Case, logits_SV: torch.Tensor, size_N: list[int]) -> Any:
    """Return the ids, the sizes and where a check is sure, with some logits for the true ones."""
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=check.needs.previous)
    rng = torch.Generator().manual_seed(0)
    ids_SK = torch.stack([torch.randperm(case.width, generator=rng) for _ in block.chosen_S])
    truth = Truth.of(logits_SV, block.chosen_S)
    prefixes = Prefixes.of(truth, ids_SK, case.decoder.pinned_P, max(size_N))
    count_SN = prefixes.counts(torch.tensor(size_N).expand(len(ids_SK), -1))
    view = View(block.known, check.needs, check.text, {})
    return prefixes, count_SN, check.is_sure(view, prefixes.scored(count_SN))


@every_check
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("num_pinned", [0, 3])
def test_logits_outside_of_a_set_change_no_verdict_on_it(
    check: Check, spread: float, num_pinned: int
) -> None:
    case, sizes = make_case(11, spread=spread, num_pinned=num_pinned), [1, 4, 9, 15]
    logits_SV = case.head.logits(case.hidden_TE[case.scored_S])
    prefixes, count_SN, is_sure_SN = verdict(check, case, logits_SV, sizes)
    assert is_sure_SN.dtype == torch.bool
    assert is_sure_SN.shape == count_SN.shape
    for n, size in enumerate(sizes):
        inside_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
        inside_SV.scatter_(1, prefixes.ids_SK[:, :size], value=True)
        inside_SV[:, case.decoder.pinned_P] = True
        noise_SV = torch.randn(logits_SV.shape, generator=torch.Generator().manual_seed(n)) * 30
        other_SV = torch.where(inside_SV, logits_SV, noise_SV)
        _, _, again_SN = verdict(check, case, other_SV, sizes)
        assert torch.equal(again_SN[:, n], is_sure_SN[:, n])


@every_check
@every_case
def test_a_step_that_is_not_sure_becomes_the_full_head_and_no_other_changes(
    check: Check, kind: str
) -> None:
    case = case_of(kind)
    texts = ("frequency", f"frequency@{check.text}")
    plain, checked = (
        one.columns for one in case.tried([parse_scheme(text) for text in texts], [1, 8, 23])
    )
    is_fallback_SN = checked["is_fallback"]
    assert not is_fallback_SN[:, -1].any()
    for name, values_SN in checked.items():
        if name != "is_fallback":
            np.testing.assert_array_equal(values_SN[~is_fallback_SN], plain[name][~is_fallback_SN])
    assert (checked["set_size"][is_fallback_SN] == case.width).all()
    assert (checked["neg_log_mass_nats"][is_fallback_SN] == 0).all()
    for name in ("hit_chosen", "hit_argmax", "hit_top_k", "hit_top_p", "hit_min_p"):
        assert checked[name][is_fallback_SN].all()


@every_check
def test_a_check_says_what_it_costs(check: Check) -> None:
    case = make_case(12)
    (block,) = blocks(case.recorded, case.decoder, case.others, num_top=check.needs.previous)
    cost = check.cost(View(block.known, check.needs, check.text, {}))
    assert cost.macs >= 0 <= cost.bytes
