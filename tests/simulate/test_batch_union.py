"""Unions of candidate sets over batches, against plain sets."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.test_candidate_stats import NUM_ROWS, SCHEMES, vocab_rows
from tracekit import schema
from tracekit.simulate.batch_union import BATCHES, DRAWS, batch_unions
from tracekit.simulate.tries import CELL

PINNED = 5
SIZES = (4, 20)


def made(
    seed: int, num_sequences: int, steps: tuple[int, ...] = (2, 1)
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return sets, candidates and costs; tokens below ``PINNED`` are pinned and in no ranking."""
    draw = np.random.default_rng(seed)
    sets, rows = [], []
    for number in range(num_sequences):
        for step in range(steps[number % len(steps)]):
            for estimator, controller, fit in SCHEMES:
                ids = PINNED + draw.permutation(NUM_ROWS - PINNED)[: draw.integers(3, 40)]
                named = {
                    "sequence_id": f"s{num_sequences - number:02}#0",
                    "position": 10 + step,
                    "estimator": estimator,
                    "controller": controller,
                }
                sets += [named | {"ids": ids.astype(np.int32)}] * 2  # two fits share a ranking
                for size in SIZES:
                    count = PINNED + min(size, len(ids))
                    is_whole = draw.random() < 0.05
                    rows.append(
                        named
                        | {"fit": fit, "size": size, "set_size": NUM_ROWS if is_whole else count}
                    )
                rows.append(rows[-1] | {"position": 99})  # a step that was not sampled
    candidates = pd.DataFrame(rows)
    return pd.DataFrame(sets), candidates, vocab_rows(draw, candidates)


def told(parts: tuple[pd.DataFrame, ...], seed: int = 0) -> list[dict[str, Any]]:
    columns = batch_unions(*parts, num_pinned=PINNED, num_rows=NUM_ROWS, seed=seed)
    rows: list[dict[str, Any]] = schema.BATCH_UNIONS.build(
        len(columns.get("batch", ())), columns
    ).to_pylist()
    return rows


def requests_of(parts: tuple[pd.DataFrame, ...], row: dict[str, Any]) -> dict[str, list[set[int]]]:
    """Return the candidates of each sampled step of a cell, by sequence."""
    sets, candidates, _ = parts
    found: dict[str, dict[int, set[int]]] = {}
    for one in candidates.to_dict("records"):
        if any(one[name] != row[name] for name in CELL):
            continue
        for ranked in sets.to_dict("records"):
            names = ("sequence_id", "position", "estimator", "controller")
            if any(ranked[name] != one[name] for name in names):
                continue
            ids = set(range(PINNED)) | set(ranked["ids"][: one["set_size"] - PINNED].tolist())
            if one["set_size"] == NUM_ROWS:
                ids = set(range(NUM_ROWS))
            found.setdefault(one["sequence_id"], {})[one["position"]] = ids
    return {name: list(some.values()) for name, some in sorted(found.items())}


def own_cost(parts: tuple[pd.DataFrame, ...], row: dict[str, Any], name: str) -> float:
    costs = [
        one[name] - one["set_size_mean"] / NUM_ROWS
        for one in parts[2].to_dict("records")
        if all(one[cell] == row[cell] for cell in CELL)
    ]
    return float(np.mean(costs))


@settings(max_examples=5)
@given(st.integers(0, 2**20), st.integers(1, 4))
def test_few_batches_are_all_looked_at(seed: int, num_sequences: int) -> None:
    parts = made(seed, num_sequences)
    rows = told(parts)
    assert len(rows) == len(SCHEMES) * len(SIZES) * sum(one <= num_sequences for one in BATCHES)
    for row in rows:
        requests = requests_of(parts, row)
        every = [
            batch
            for names in combinations(requests, row["batch"])
            for batch in product(*(requests[name] for name in names))
        ]
        assert len(every) <= DRAWS
        assert (row["num_draws"], row["n"]) == (len(every), num_sequences)
        union = np.mean([len(set().union(*batch)) for batch in every])
        own = np.mean([len(one) for batch in every for one in batch])
        bytes_frac, macs_frac = (own_cost(parts, row, name) for name in ("cost_frac", "macs_frac"))
        assert row["union_size"] == pytest.approx(union)
        assert row["union_frac"] == pytest.approx(union / NUM_ROWS)
        assert row["cost_frac"] == pytest.approx(union / NUM_ROWS + bytes_frac)
        assert row["macs_own_frac"] == pytest.approx(own / NUM_ROWS + macs_frac)
        assert row["macs_union_frac"] == pytest.approx(union / NUM_ROWS + macs_frac)


def test_drawn_batches_hold_different_sequences_and_come_near_the_mean_of_all() -> None:
    parts = made(3, 9, (2,))
    for row in told(parts):
        requests = list(requests_of(parts, row).values())
        if row["batch"] == 1:
            assert row["num_draws"] == 18
        else:
            assert row["num_draws"] == DRAWS
        every = [
            len(set().union(*batch))
            for some in combinations(requests, row["batch"])
            for batch in product(*some)
        ]
        error = np.std(every) / np.sqrt(row["num_draws"])
        assert abs(row["union_size"] - np.mean(every)) <= 5 * error + 1e-9


def test_batches_are_those_of_the_seed_whatever_the_order_of_rows() -> None:
    parts = made(4, 9, (2,))
    rows = told(parts)
    mixed = tuple(part.sample(frac=1, random_state=2) for part in parts)

    def sorted_rows(some: list[dict[str, Any]]) -> list[Any]:
        return sorted(tuple(row.values()) for row in some)

    for one, two in zip(sorted_rows(rows), sorted_rows(told(mixed)), strict=True):
        assert one[:7] == two[:7]
        np.testing.assert_allclose(one[7:], two[7:])
    assert sorted_rows(told(parts, seed=1)) != sorted_rows(rows)


def test_a_larger_batch_reads_more_rows_and_a_request_that_falls_back_reads_all() -> None:
    sets, candidates, vocab = made(5, 3, (1,))
    rows = told((sets, candidates.assign(set_size=NUM_ROWS), vocab))
    assert {row["union_size"] for row in rows} == {NUM_ROWS}
    assert told((sets.iloc[:0], candidates, vocab)) == []
