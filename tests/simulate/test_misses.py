"""Lists of wrongly pruned tokens, against plain loops over made-up steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.test_candidate_stats import NUM_ROWS, frames
from tracekit import schema
from tracekit.simulate.misses import CONTEXT_TOKENS, SHOWN_MISSES, miss_classes, misses
from tracekit.simulate.tries import CELL, Tries

TEXTS = np.array([f"t{one}," for one in range(NUM_ROWS - 4)], dtype=object)


def tokens_of(scored: pd.DataFrame) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    ends = scored.groupby("sequence_id")["position"].max()
    return {str(name): draw.integers(NUM_ROWS, size=end + 1) for name, end in ends.items()}


def text_of(token_id: int) -> str:
    return f"t{token_id}," if token_id < len(TEXTS) else f"<row {token_id}>"


def rows_of(table: schema.Table, columns: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.build(len(columns["estimator"]), columns).to_pylist()
    return rows


def joined(candidates: pd.DataFrame, scored: pd.DataFrame) -> pd.DataFrame:
    return candidates.merge(scored, on=["sequence_id", "position"])


@settings(max_examples=6)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([2, 14]))
def test_the_surest_misses_are_those_that_a_loop_finds(seed: int, hit: float, num: int) -> None:
    candidates, scored, _ = frames(seed, 3, num, hit)
    tokens = tokens_of(scored)
    found = rows_of(schema.MISSES, misses(Tries.of(candidates, scored), tokens, TEXTS))
    frame = joined(candidates, scored)
    expected = []
    for cell in candidates[list(CELL)].drop_duplicates().itertuples(index=False, name=None):
        own = frame[
            (frame[list(CELL)] == pd.Series(dict(zip(CELL, cell, strict=True)))).all(axis=1)
        ]
        missed = [row for row in own.to_dict("records") if not row["hit_argmax"]]
        missed.sort(key=lambda row: (-row["best_prob"], row["sequence_id"], row["position"]))
        expected += [
            (place, len(missed), row) for place, row in enumerate(missed[:SHOWN_MISSES], 1)
        ]
    assert len(found) == len(expected)
    for row, (place, count, step) in zip(found, expected, strict=True):
        assert (row["place"], row["num_misses"]) == (place, count)
        for name in (
            *CELL,
            "sequence_id",
            "position",
            "best_id",
            "best_prob",
            "token_id",
            "domain",
        ):
            assert row[name] == step[name]
        assert row["class"] == step["best_class"]
        assert row["text"] == text_of(step["best_id"])
        assert row["token_text"] == text_of(step["token_id"])
        end = step["position"]
        before = tokens[step["sequence_id"]][end - CONTEXT_TOKENS : end]
        assert row["context"] == "".join(text_of(one) for one in before)


def test_the_context_of_an_early_token_begins_with_its_text() -> None:
    candidates, scored, _ = frames(1, 1, 3, hit=0.0)
    for frame in (candidates, scored):
        frame["position"] -= 18
    found = rows_of(schema.MISSES, misses(Tries.of(candidates, scored), tokens_of(scored), TEXTS))
    ids = tokens_of(scored)["s01#0"]
    by_position = {row["position"]: row["context"] for row in found}
    assert by_position[2] == text_of(ids[0]) + text_of(ids[1])


@settings(max_examples=6)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.6, 1.0]))
def test_shares_of_classes_are_those_that_a_loop_counts(seed: int, hit: float) -> None:
    candidates, scored, _ = frames(seed, 3, 7, hit)
    frame = joined(candidates, scored)
    found = rows_of(schema.MISS_CLASSES, miss_classes(Tries.of(candidates, scored)))
    seen = set()
    for row in found:
        cell = pd.Series({name: row[name] for name in CELL})
        own = frame[(frame[list(CELL)] == cell).all(axis=1)].to_dict("records")
        missed = [one for one in own if not one["hit_argmax"]]
        count = sum(one["best_class"] == row["class"] for one in own)
        lost = sum(one["best_class"] == row["class"] for one in missed)
        assert (row["num_steps"], row["num_misses"]) == (count, lost)
        assert row["step_share"] == pytest.approx(count / len(own))
        if missed:
            assert row["miss_share"] == pytest.approx(lost / len(missed))
            assert row["lift"] == pytest.approx((lost / len(missed)) / (count / len(own)))
        else:
            assert row["miss_share"] is None
            assert row["lift"] is None
        seen.add((*cell, row["class"]))
    assert seen == set(frame[[*CELL, "best_class"]].itertuples(index=False, name=None))
