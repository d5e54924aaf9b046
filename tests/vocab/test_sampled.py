"""Rankings of a few steps that are kept for batches of several sequences."""

from __future__ import annotations

import pytest
import torch

from tests.vocab.cases import make_case
from tracekit.vocab import blocks as blocks_module
from tracekit.vocab.engine import sampled_steps
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.previous import Previous


@pytest.mark.parametrize(
    ("num_steps", "wanted"), [(1, [0]), (2, [0, 1]), (3, [1, 2]), (9, [3, 6]), (100, [33, 66])]
)
def test_steps_a_third_in_and_two_thirds_in_are_kept(num_steps: int, wanted: list[int]) -> None:
    assert sampled_steps(num_steps) == wanted


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_kept_rankings_are_the_estimators_own_without_pinned_tokens(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "BLOCK_NUMBERS", 23 * rows)
    case = make_case(scored=[1, 2, 3, 5, 6, 8], num_pinned=4)
    for estimator in (Previous(top=4), Frequency()):
        (one,) = case.tried_fixed([estimator], [2, 9])
        ranked = case.candidates(estimator, 23)
        assert list(one.samples) == [2, 4]
        for step, ids_K in one.samples.items():
            beside = [i for i in ranked[step] if i not in case.pinned_ids.tolist()]
            assert ids_K.tolist() == beside[:9]


def test_kept_rankings_do_not_hold_on_to_their_blocks() -> None:
    (one,) = make_case().tried_fixed([Frequency()], [2])
    for ids_K in one.samples.values():
        assert torch.from_numpy(ids_K).untyped_storage().nbytes() <= 8 * 2 + 8
