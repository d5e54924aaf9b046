"""Sizes that a scheme asks for: as given, or fitted on other prompts, or on the own steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.vocab.cases import Case, make_case
from tracekit.vocab import budget
from tracekit.vocab.budget import ASKED, OTHERS, OWN, SHUFFLED, Asked, asked
from tracekit.vocab.controller import fit_scale, weights
from tracekit.vocab.controllers.rate import Rate
from tracekit.vocab.scheme import parse_scheme

SCHEME = parse_scheme("frequency@rate:gain=9,window=2")
CONTROLLER = Rate(gain=9.0, window=2)


def case_of(seed: int = 0) -> Case:
    return make_case(seed, num_rows=30, scored=list(range(4, 30)))


def sizes_of(case: Case, sizes: list[int], text: str | None = None) -> dict[str, Asked]:
    scheme = SCHEME if text is None else parse_scheme(text)
    return {one.fit: one for one in asked(scheme, sizes, case.recorded, case.others)}


def test_a_fixed_size_is_as_asked_at_every_step() -> None:
    (one,) = sizes_of(case_of(), [4, 9], "frequency").values()
    assert one.fit == ASKED
    assert one.size_SN.tolist() == [[4, 9]] * 26


def test_a_fit_on_others_reads_their_weights_alone() -> None:
    case = case_of()
    found = sizes_of(case, [4, 9])
    assert list(found) == [OTHERS, OWN, SHUFFLED]
    weight_S = weights(CONTROLLER, *case.recorded.runs())
    theirs_X = np.concatenate([weights(CONTROLLER, *one.runs()) for one in case.others.texts])
    for n, size in enumerate([4, 9]):
        scale = fit_scale(size, theirs_X)
        assert abs(scale.sizes(theirs_X).mean() - size) < 1
        assert found[OTHERS].size_SN[:, n].tolist() == scale.sizes(weight_S).tolist()
        own = fit_scale(size, weight_S).sizes(weight_S)
        assert found[OWN].size_SN[:, n].tolist() == own.tolist()
        assert abs(own.mean() - size) < 1


def test_shuffled_sizes_are_those_of_the_own_fit_at_other_steps_the_same_each_time() -> None:
    one, again = (sizes_of(case_of(), [4, 9]) for _ in range(2))
    assert torch.equal(one[SHUFFLED].size_SN, again[SHUFFLED].size_SN)
    own, shuffled = (sorted(one[fit].size_SN.tolist()) for fit in (OWN, SHUFFLED))
    assert own == shuffled
    assert not torch.equal(one[OWN].size_SN, one[SHUFFLED].size_SN)


def test_later_runs_of_the_own_prompt_do_not_change_sizes_fitted_on_others() -> None:
    case, row = case_of(), 15
    hidden_TE = case.hidden_TE.clone()
    hidden_TE[row:] = torch.randn(hidden_TE[row:].shape) * 5
    other = case.but(own=case.own.but(hidden_TE=hidden_TE))
    # Step 15 - 4 is the last whose head has not run on a changed state.
    end = row - 4 + 1
    before, after = (sizes_of(one, [9])[OTHERS].size_SN for one in (case, other))
    assert torch.equal(before[:end], after[:end])
    assert not torch.equal(before, after)


def test_without_other_prompts_there_is_no_fit_on_them() -> None:
    assert list(sizes_of(case_of().but(rest=()), [4])) == [OWN, SHUFFLED]


def test_other_prompts_without_steps_count_for_nothing() -> None:
    case = case_of()
    empty = tuple(one.but(scored_S=torch.empty(0, dtype=torch.int64)) for one in case.rest)
    assert list(sizes_of(case.but(rest=empty), [4])) == [OWN, SHUFFLED]
    half = case.but(rest=(empty[0], case.rest[1]))
    assert list(sizes_of(half, [4])) == [OTHERS, OWN, SHUFFLED]


def test_weights_of_other_prompts_are_taken_once_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    case, taken = case_of(), []

    def counted(*given: object) -> np.ndarray:
        taken.append(given)
        return weights(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(budget, "weights", counted)
    first = sizes_of(case, [4])
    assert len(taken) == 1 + 2
    again = sizes_of(case, [4, 9])
    assert len(taken) == 1 + 2 + 1
    assert torch.equal(first[OTHERS].size_SN[:, 0], again[OTHERS].size_SN[:, 0])
    # Another controller has weights of its own.
    sizes_of(case, [4], "frequency@rate:gain=8,window=2")
    assert len(taken) == 1 + 2 + 1 + 3


@pytest.mark.parametrize("fit", [OTHERS, OWN, SHUFFLED])
def test_sizes_stay_within_the_spread(fit: str) -> None:
    size_SN = sizes_of(case_of(3), [8])[fit].size_SN
    assert size_SN.dtype == torch.int64
    assert int(size_SN.min()) >= 2
    assert int(size_SN.max()) <= 32
