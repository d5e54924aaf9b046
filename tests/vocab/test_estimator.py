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
from tracekit.vocab.estimator import ESTIMATORS, CausalEstimator, Cost, Estimator, parse_estimator
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous

if TYPE_CHECKING:
    from tracekit.vocab.view import View


def test_the_registry_holds_these_estimators() -> None:
    kinds = {"frequency": Frequency, "lowrank": LowRank, "oracle": Oracle, "previous": Previous}
    assert {name: ESTIMATORS.get(name) for name in kinds} == kinds
    assert not Oracle.causal


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oracle", Oracle()),
        (" frequency ", Frequency()),
        ("lowrank", LowRank(rank=64)),
        ("lowrank:rank=08", LowRank(rank=8)),
        (" previous: top = 3 ", Previous(top=3)),
    ],
)
def test_a_text_names_an_estimator(text: str, wanted: Estimator) -> None:
    assert parse_estimator(text) == wanted


def test_the_canonical_text_names_every_parameter() -> None:
    assert [one.text for one in (Oracle(), Frequency(), LowRank(), Previous(top=3))] == [
        "oracle",
        "frequency",
        "lowrank:rank=64",
        "previous:top=3",
    ]


@given(st.integers(1, 10**20))
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
        ("lowrank:rnk=3", "unknown parameter of lowrank 'rnk'; did you mean 'rank'"),
        ("lowrank:rank=3,", "parameter of lowrank"),
        ("oracle:rank=3", "parameter of oracle"),
        ("oracle:", "parameter of oracle"),
        ("lowrank:rank", "whole number"),
        ("lowrank:rank=", "whole number"),
        ("lowrank:rank=-3", "whole number"),
        ("lowrank:rank=1.5", "whole number"),
        ("lowrank:rank=3,rank=4", "give rank once"),
        ("lowrank:rank=0", "lowrank:rank=0: rank must be at least 1"),
        ("previous:top=0", "previous:top=0: top must be at least 1"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_estimator(text)


@dataclass(frozen=True)
class Undeclared(CausalEstimator):
    """Read tokens that were not asked for."""

    name: ClassVar[str] = "undeclared"

    def ranking(self, view: View, limit: int) -> torch.Tensor:
        return view.token_ids(0)[None]

    def cost(self, head: object, size: int) -> Cost:
        return Cost()


def test_an_estimator_that_reads_what_it_did_not_declare_is_stopped_by_the_engine() -> None:
    with pytest.raises(TracekitError, match="estimator undeclared reads 'tokens'"):
        make_case().evaluate([Undeclared()], [4])


def test_a_causal_ranking_gets_no_logits() -> None:
    seen: list[tuple[Any, ...]] = []

    @dataclass(frozen=True)
    class Listens(CausalEstimator):
        name: ClassVar[str] = "listens"

        def ranking(self, *given: Any) -> torch.Tensor:
            seen.append(given)
            return torch.full((given[0].num_steps, 1), -1)

        def cost(self, head: object, size: int) -> Cost:
            return Cost()

    make_case().evaluate([Listens()], [4])
    ((view, limit),) = seen
    assert limit == 4 + 3
    assert not any("logits" in name for name in (*dir(view), *vars(view._known)))
