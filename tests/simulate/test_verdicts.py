"""Verdicts by domain, against plain loops over made-up steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate.test_candidate_stats import frames
from tracekit import schema
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.tries import CELL, Tries
from tracekit.simulate.verdicts import VERDICT_SEQUENCES, steps_needed, verdicts

Parts = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]


def told(parts: Parts) -> dict[tuple[str, float], dict[str, Any]]:
    candidates, scored, vocab = parts
    columns = verdicts(Tries.of(candidates, scored), vocab, seed=3)
    rows = schema.VERDICTS.build(len(columns["domain"]), columns).to_pylist()
    return {(row["domain"], row["hit_level"]): row for row in rows}


def by_hand(parts: Parts, domain: str, level: float) -> tuple[str, list[dict[str, Any]]]:
    """Return the verdict, and the cells among which the one that is named must be."""
    candidates, scored, vocab = parts
    frame = candidates.merge(scored[["sequence_id", "position", "domain"]])
    cells = []
    for cell, part in frame.groupby(list(CELL), sort=False):
        own = part if domain == "all" else part[part["domain"] == domain]
        if cell[0] == "oracle" or cell[2] not in ("asked", "others") or not len(own):
            continue
        names = sorted(own["sequence_id"].unique())
        hits = [own.loc[own["sequence_id"] == name, "hit_argmax"] for name in names]
        found = bootstrap_mean(
            [one.mean() for one in hits], seed=3, weights=[len(one) for one in hits]
        )
        costs = vocab[
            (vocab[list(CELL)] == pd.Series(dict(zip(CELL, cell, strict=True)))).all(axis=1)
        ]
        by_name = dict(zip(costs["sequence_id"], costs["cost_frac"], strict=True))
        cost = np.average([by_name[name] for name in names], weights=[len(one) for one in hits])
        row = dict(zip(CELL, cell, strict=True)) | {"cost": cost, "num": len(own)}
        row |= {"hit": found.mean, "low": found.low, "high": found.high, "n": found.n}
        cells.append(row | {"set": own["set_size"].mean()})
    cheap = [one for one in cells if one["cost"] < 1] or cells
    most = max(one["hit"] for one in cheap)
    best = [one for one in cheap if one["hit"] == most]
    if max(one["n"] for one in cells) < VERDICT_SEQUENCES:
        return "too few sequences", best
    if max(one["num"] for one in cells) < steps_needed(level):
        return "not enough steps", best
    kept = [
        one
        for one in cells
        if one["n"] >= VERDICT_SEQUENCES
        and one["num"] >= steps_needed(level)
        and one["low"] >= level
        and one["cost"] < 1
    ]
    if not kept:
        return "not suitable", best
    return "kept", [min(kept, key=lambda one: one["cost"])]


@settings(max_examples=6)
@given(
    st.integers(0, 2**20),
    st.sampled_from([3, 9, 20]),
    st.sampled_from([5, 40]),
    st.sampled_from([0.5, 0.97, 0.998, 1.0]),
)
def test_verdicts_are_those_of_plain_loops(
    seed: int, num_sequences: int, num_steps: int, hit: float
) -> None:
    parts = frames(seed, num_sequences, num_steps, hit)
    found = told(parts)
    assert set(found) == {
        (name, level) for name in ("all", "story", "code") for level in (0.99, 0.999)
    }
    for (domain, level), row in found.items():
        verdict, cells = by_hand(parts, domain, level)
        assert row["verdict"] == verdict
        assert row["why"].startswith(verdict)
        named = [one for one in cells if all(one[name] == row[name] for name in CELL)]
        assert len(named) == 1
        for name, other in {
            "hit_argmax": "hit",
            "cost_frac": "cost",
            "set_size_mean": "set",
        }.items():
            assert row[name] == pytest.approx(named[0][other])
        assert (row["n"], row["num_steps"]) == (named[0]["n"], named[0]["num"])
        for name in ("low", "high"):
            assert row[name] == (None if named[0][name] is None else pytest.approx(named[0][name]))


def test_99_9_percent_takes_3000_steps_and_99_percent_300() -> None:
    assert steps_needed(0.999) == 3000
    assert steps_needed(0.99) == 300


def test_the_cheapest_that_keeps_a_level_is_named() -> None:
    parts = frames(0, 9, 40, hit=1.0)
    row = told(parts)["all", 0.99]
    assert row["verdict"] == "kept"
    assert row["low"] == 1
    candidates, scored, vocab = parts
    dear = vocab.assign(cost_frac=vocab["cost_frac"] + (vocab["estimator"] == row["estimator"]))
    other = told((candidates, scored, dear))["all", 0.99]
    assert other["verdict"] == "kept"
    assert other["estimator"] != row["estimator"]


def test_sets_that_read_as_much_as_the_head_keep_nothing() -> None:
    candidates, scored, vocab = frames(0, 9, 40, hit=1.0)
    row = told((candidates, scored, vocab.assign(cost_frac=1.0)))["all", 0.99]
    assert row["verdict"] == "not suitable"
    assert row["hit_argmax"] == 1


@pytest.mark.parametrize("fit", ["own", "shuffled"])
def test_bounds_and_sizes_fitted_on_the_sequence_itself_are_never_named(fit: str) -> None:
    candidates, scored, vocab = frames(0, 9, 40, hit=1.0)
    own, dear = (frame.replace({"fit": {"others": fit}}) for frame in (candidates, vocab))
    is_left = [frame["estimator"] != "frequency:source=all" for frame in (own, dear)]
    found = told((own[is_left[0]], scored, dear[is_left[1]]))
    for row in found.values():
        assert row["verdict"] == "nothing to judge"
        assert row["estimator"] is None
        assert row["n"] is None


def test_between_3_and_8_sequences_there_is_an_interval_but_no_verdict() -> None:
    row = told(frames(1, 5, 90, hit=1.0))["all", 0.99]
    assert row["verdict"] == "too few sequences"
    assert row["why"] == "too few sequences: n = 5, 8 needed"
    assert row["low"] == 1
    few = told(frames(1, 2, 90, hit=1.0))["all", 0.99]
    assert few["low"] is None
