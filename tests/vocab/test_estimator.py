"""Estimators by their text, and what an estimator cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.vocab.cases import make_case
from tracekit.errors import TracekitError, UsageError
from tracekit.parameters import LARGEST
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost, Estimator, parse_estimator
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous
from tracekit.vocab.estimators.random import Random

if TYPE_CHECKING:
    from tracekit.vocab.view import View


def test_the_registry_holds_these_estimators() -> None:
    kinds = {
        "frequency": Frequency,
        "lowrank": LowRank,
        "oracle": Oracle,
        "previous": Previous,
        "random": Random,
    }
    assert {name: ESTIMATORS.get(name) for name in kinds} == kinds
    assert not Oracle.causal


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oracle", Oracle()),
        ("oracle:", Oracle()),
        (" frequency ", Frequency()),
        ("frequency:source=domain", Frequency(source="domain")),
        ("lowrank", LowRank(rank=64)),
        ("lowrank:rank=08", LowRank(rank=8)),
        (" previous: top = 3 ", Previous(top=3)),
        ("random:seed=0", Random()),
    ],
)
def test_a_text_names_an_estimator(text: str, wanted: Estimator) -> None:
    assert parse_estimator(text) == wanted


def test_the_canonical_text_names_every_parameter() -> None:
    assert [one.text for one in (Oracle(), Frequency(), LowRank(), Previous(top=3))] == [
        "oracle",
        "frequency:source=all",
        "lowrank:rank=64",
        "previous:top=3",
    ]


@given(st.integers(1, LARGEST))
def test_parameters_survive_their_text(value: int) -> None:
    assert parse_estimator(LowRank(rank=value).text) == LowRank(rank=value)
    assert parse_estimator(Previous(top=value).text) == Previous(top=value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lowrnk", "unknown estimator 'lowrnk'; did you mean 'lowrank'"),
        ("previuos:top=3", "did you mean 'previous'"),
        ("", "unknown estimator ''"),
        ("Oracle", "did you mean 'oracle'"),
        ("lowrank:rnk=3", "unknown parameter 'rnk'; did you mean 'rank'"),
        ("oracle:rank=3", "unknown parameter 'rank'"),
        ("lowrank:rank", "'rank' is not one new parameter"),
        ("lowrank:rank=", "rank='' is no int"),
        ("lowrank:rank=1.5", "rank='1.5' is no int"),
        ("lowrank:rank=999999999999", "rank=999999999999 is no number that can be used"),
        ("lowrank:rank=3,rank=4", "'rank=4' is not one new parameter"),
        ("lowrank:rank=0", "lowrank:rank=0: rank must be at least 1"),
        ("lowrank:rank=-3", "rank must be at least 1"),
        ("previous:top=0", "previous:top=0: top must be at least 1"),
        ("random:seed=-1", "seed must be at least 0"),
        ("frequency:source=domains", "unknown source 'domains'; did you mean 'domain'"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_estimator(text)


def test_a_part_of_a_number_is_from_0_on_and_finite() -> None:
    @dataclass(frozen=True)
    class Part(Oracle):
        share: float = 0.5

    assert Part(0.0).text == "oracle:share=0"
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="share is a number from 0 on"):
            Part(wrong)


@dataclass(frozen=True)
class Undeclared(CausalEstimator):
    """Read tokens that were not asked for."""

    name: ClassVar[str] = "undeclared"

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return view.token_ids(0)[None]

    def cost(self, view: View, size: int) -> Cost:
        return Cost()


def test_an_estimator_that_reads_what_it_did_not_declare_is_stopped_by_the_engine() -> None:
    with pytest.raises(TracekitError, match="undeclared reads 'tokens' without declaring it"):
        make_case().tried_fixed([Undeclared()], [4])


def test_a_causal_ranking_gets_no_logits() -> None:
    seen: list[tuple[Any, ...]] = []

    @dataclass(frozen=True)
    class Listens(CausalEstimator):
        name: ClassVar[str] = "listens"

        def ranking(self, *given: Any) -> torch.Tensor:
            seen.append(given)
            return torch.full((given[0].num_steps, 1), -1)

        def cost(self, view: View, size: int) -> Cost:
            return Cost()

    make_case().tried_fixed([Listens()], [4])
    ((view, limit),) = seen
    assert limit == 4 + 3
    assert not any("logits" in name for name in (*dir(view), *vars(view._known)))


def test_costs_add_up_and_scale() -> None:
    total = Cost(macs=2, bytes=3) + Cost(macs=5, bytes=7) * 2
    assert total == Cost(macs=12, bytes=17)
    assert Cost() == Cost(macs=0, bytes=0)
