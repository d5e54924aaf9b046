"""Statistics of a step against their definitions, in closed forms and at the edges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit import schema
from tracekit.errors import UsageError
from tracekit.measure import logits, support
from tracekit.measure.logits import best_ids, step_statistics

INF = math.inf

LOGITS = st.one_of(
    st.floats(-60, 60, width=32),
    st.integers(-3, 3).map(float),
    st.just(-INF),
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows of logits with at least one finite, targets, and the number of real tokens."""
    width, num_rows = draw(st.integers(1, 30)), draw(st.integers(1, 4))
    table = []
    for _ in range(num_rows):
        row = draw(st.lists(LOGITS, min_size=width, max_size=width))
        if max(row) == -INF:
            row[draw(st.integers(0, width - 1))] = 0.0
        table.append(row)
    targets = draw(st.lists(st.integers(0, width - 1), min_size=num_rows, max_size=num_rows))
    return torch.tensor(table), torch.tensor(targets), draw(st.integers(1, width))


@settings(max_examples=200, deadline=None)
@given(rows(), st.sampled_from([0.25, 0.7, 1.0, 3.0]), st.integers(1, 40))
def test_every_statistic_equals_its_definition(
    case: tuple[torch.Tensor, torch.Tensor, int], temperature: float, top_k: int
) -> None:
    logits_TV, target_T, num_tokens = case
    asked: dict[str, Any] = {"num_tokens": num_tokens, "temperature": temperature, "top_k": top_k}
    fast = step_statistics(logits_TV, target_T, **asked)
    for t, row in enumerate(logits_TV.tolist()):
        twin = slow.statistics(row, int(target_T[t]), **asked)
        assert set(twin) == set(fast)
        for name, wanted in twin.items():
            np.testing.assert_allclose(fast[name][t], wanted, rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_columns_are_those_of_the_schema_and_fit_into_it() -> None:
    logits_TV = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    logits_TV[1, 7] = math.nan
    columns = step_statistics(logits_TV, torch.tensor([0, 1, 2]), num_tokens=40)
    table = schema.STEPS.build(3, columns)
    filled = {name for name in table.column_names if table[name].null_count < 3}
    assert filled == set(columns)
    assert table["rank"].null_count == table["entropy_nats"].null_count == 1
    assert table["rank"].type == pa.int32()


@pytest.mark.parametrize("width", [1, 2, 7, 1000, 20_000])
def test_equal_logits_give_the_entropy_and_support_of_as_many_tokens(width: int) -> None:
    found = step_statistics(
        torch.full((1, width), 3.5), torch.tensor([width - 1]), num_tokens=width
    )
    assert found["entropy_nats"][0] == pytest.approx(math.log(width), rel=1e-6)
    assert found["renyi2_nats"][0] == pytest.approx(math.log(width), rel=1e-6, abs=1e-12)
    assert found["varentropy"][0] == pytest.approx(0, abs=1e-12)
    assert found["rank"][0] == 0
    for percent in (90, 95, 99):
        assert found[f"effective_support_{percent}"][0] == -(-percent * width // 100)
    assert found["top_ids"][0].tolist() == list(range(min(width, 20)))


def test_one_token_alone_has_no_entropy_and_no_margin() -> None:
    logits_TV = torch.tensor([[-INF, 2.0, -INF]])
    found = step_statistics(logits_TV, torch.tensor([1]), num_tokens=3)
    assert found["entropy_nats"][0] == found["surprisal_nats"][0] == found["varentropy"][0] == 0
    assert found["top1_margin"][0] == INF
    assert found["nonfinite"][0] == 2
    alone = step_statistics(torch.tensor([[5.0]]), torch.tensor([0]), num_tokens=1)
    assert math.isnan(alone["top1_margin"][0])
    assert alone["effective_support_99"][0] == 1


def test_two_tokens_follow_the_logistic_function() -> None:
    gap = 1.7
    p = 1 / (1 + math.exp(-gap))
    found = step_statistics(torch.tensor([[gap, 0.0]]), torch.tensor([1]), num_tokens=2)
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert found["entropy_nats"][0] == pytest.approx(entropy, rel=1e-6)
    assert found["varentropy"][0] == pytest.approx(p * (1 - p) * gap**2, rel=1e-6)
    assert found["surprisal_nats"][0] == pytest.approx(-math.log(1 - p), rel=1e-6)
    assert found["top1_margin"][0] == pytest.approx(gap, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_free_energy_is_energy_minus_temperature_times_entropy(temperature: float) -> None:
    logits_TV = 100 + 5 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    found = step_statistics(
        logits_TV, torch.zeros(50, dtype=torch.int64), num_tokens=300, temperature=temperature
    )
    sides = found["internal_energy"] - temperature * found["entropy_nats"]
    np.testing.assert_allclose(found["free_energy"], sides, rtol=1e-6, atol=1e-6)


def test_energies_do_not_depend_on_a_constant_in_the_logits() -> None:
    logits_TV = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(2)).float()
    target_T = torch.arange(5)
    low = step_statistics(logits_TV, target_T, num_tokens=64)
    high = step_statistics(logits_TV + 32, target_T, num_tokens=64)
    for name in set(low) - {"logsumexp"}:
        np.testing.assert_array_equal(low[name], high[name], err_msg=name)
    np.testing.assert_allclose(high["logsumexp"] - low["logsumexp"], 32, rtol=1e-6)


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [INF, 0.0], [-INF, -INF], [INF, math.nan]])
def test_a_row_without_a_distribution_is_blank_and_leaves_its_neighbours_alone(
    bad: list[float],
) -> None:
    good = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    target_T = torch.tensor([0, 1])
    mixed = torch.cat([good[:1], torch.tensor([bad]), good[1:]])
    found = step_statistics(mixed, torch.tensor([0, 1, 1]), num_tokens=2)
    alone = step_statistics(good, target_T, num_tokens=2)
    for name, values in found.items():
        np.testing.assert_array_equal(values[[0, 2]], alone[name], err_msg=name)
    assert found["nonfinite"][1] == sum(not math.isfinite(z) for z in bad)
    assert (found["top_ids"][1] == -1).all()
    assert all(np.isnan(found[name][1]).all() for name in set(found) - {"nonfinite", "top_ids"})


def test_bfloat16_logits_are_read_as_they_are() -> None:
    half = (torch.randn(4, 90, generator=torch.Generator().manual_seed(3)) * 8).bfloat16()
    target_T = torch.tensor([3, 1, 4, 1])
    found = step_statistics(half, target_T, num_tokens=90)
    wide = step_statistics(half.float(), target_T, num_tokens=90)
    for name, values in found.items():
        np.testing.assert_array_equal(values, wide[name], err_msg=name)


def test_padded_rows_are_part_of_the_distribution_and_their_mass_is_told() -> None:
    found = step_statistics(torch.zeros(1, 10), torch.tensor([0]), num_tokens=8)
    assert found["padded_mass"][0] == pytest.approx(0.2)
    assert found["entropy_nats"][0] == pytest.approx(math.log(10), rel=1e-6)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV = torch.randn(11, 50, generator=torch.Generator().manual_seed(4))
    target_T = torch.arange(11)
    whole = step_statistics(logits_TV, target_T, num_tokens=50)
    monkeypatch.setattr(logits, "BLOCK_NUMBERS", 100)
    monkeypatch.setattr(support, "SUPPORT_PREFIX", 2)
    monkeypatch.setattr(support, "BINS_PER_NAT", 3)
    monkeypatch.setattr(support, "NUM_BINS", 5)
    for name, values in step_statistics(logits_TV, target_T, num_tokens=50).items():
        np.testing.assert_array_equal(values, whole[name], err_msg=name)


def test_no_rows_give_empty_columns() -> None:
    found = step_statistics(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), num_tokens=5)
    assert {len(values) for values in found.values()} == {0}
    assert found["top_ids"].shape == (0, 5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature: float) -> None:
    with pytest.raises(UsageError, match="temperature"):
        step_statistics(torch.zeros(1, 2), torch.tensor([0]), num_tokens=2, temperature=temperature)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(LOGITS, st.just(-0.0)), min_size=1, max_size=40), st.integers(1, 50))
def test_best_ids_are_sorted_by_score_and_then_by_id(scores: list[float], k: int) -> None:
    assert best_ids(torch.tensor([scores]), k)[0].tolist() == slow.order(scores)[:k]
