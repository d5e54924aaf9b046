"""Statistics of candidate sets by group, against plain loops over made-up steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit import schema
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.candidate_stats import MEANS, PERCENTS, UNITS, candidate_stats
from tracekit.simulate.quotients import quotients
from tracekit.simulate.step_groups import step_groups
from tracekit.simulate.tries import CELL, Tries

DOMAINS = ("story", "code", "story")
CLASSES = ("word", "number", "cjk")
SCHEMES = (
    ("frequency:source=all", "fixed", "asked"),
    ("previous:top=256", "rate:gain=4,level=0,window=8", "others"),
    ("oracle", "fixed", "asked"),
)
SIZES = (8, 16)
NUM_ROWS = 64


def scored_steps(
    draw: np.random.Generator, num_sequences: int, num_steps: int, **columns: Any
) -> pd.DataFrame:
    """Return rows of ``schema.SCORED``: sequences of unequal length, not in order of their names."""
    frames = []
    for number in range(num_sequences):
        size = num_steps + 3 * number
        frames.append(
            pd.DataFrame(
                {
                    "sequence_id": f"s{num_sequences - number:02}#0",
                    "domain": DOMAINS[number % 3],
                    "bucket": ("< 256", "256 - 1k")[number % 2],
                    "position": 20 + np.arange(size) + np.arange(size) // 5,
                    "token_id": draw.integers(NUM_ROWS, size=size),
                    "best_id": draw.integers(NUM_ROWS, size=size),
                    "class": draw.choice(CLASSES, size=size),
                    "best_class": draw.choice(CLASSES, size=size),
                    "nll_full": draw.gamma(1.0, size=size),
                    "best_prob": draw.choice([0.3, 0.6, 0.9, 0.95], size=size),
                    "entropy_nats": draw.uniform(0, 6, size=size),
                    "is_given": number % 2 == 0,
                    "regime": np.where(
                        draw.random(size) < 0.2, np.nan, draw.integers(3, size=size)
                    ),
                }
                | columns
            )
        )
    return pd.concat(frames, ignore_index=True)


def candidate_rows(
    draw: np.random.Generator, scored: pd.DataFrame, hit: float = 0.8
) -> pd.DataFrame:
    """Return rows of ``schema.CANDIDATES`` in no order; one cell lacks a sequence."""
    frames = []
    for estimator, controller, fit in SCHEMES:
        for size in SIZES:
            num = len(scored)
            frame = pd.DataFrame(
                {
                    "sequence_id": scored["sequence_id"],
                    "position": scored["position"],
                    "estimator": estimator,
                    "controller": controller,
                    "fit": fit,
                    "size": size,
                    "set_size": draw.integers(size, size + 4, size=num),
                    "is_fallback": draw.random(num) < 0.1,
                    **{
                        f"hit_{rule}": draw.random(num) < hit
                        for rule in ("chosen", "argmax", "top_k", "top_p", "min_p")
                    },
                    "neg_log_mass_nats": np.where(
                        draw.random(num) < 0.01, np.inf, draw.gamma(1.0, size=num)
                    ),
                    "jsd_nats": draw.random(num),
                    "backoff_kl_nats": draw.random(num),
                    "backoff_kl_causal_nats": draw.random(num),
                    "nll_backoff": draw.gamma(2.0, size=num),
                }
            )
            frames.append(frame if size == SIZES[0] else frame[frame["sequence_id"] != "s01#0"])
    rows = pd.concat(frames, ignore_index=True)
    order = np.concatenate([[0], 1 + draw.permutation(len(rows) - 1)])
    return rows.iloc[order].reset_index(drop=True)


def vocab_rows(draw: np.random.Generator, candidates: pd.DataFrame) -> pd.DataFrame:
    """Return rows of ``schema.VOCAB_RESULTS`` of the same cells, costs drawn."""
    by = [*CELL, "sequence_id"]
    rows = candidates.groupby(by, observed=True, sort=False)["set_size"].mean().reset_index()
    rows = rows.rename(columns={"set_size": "set_size_mean"})
    extra = draw.uniform(0, 0.2, size=(2, len(rows)))
    share = rows["set_size_mean"] / NUM_ROWS
    return rows.assign(cost_frac=share + extra[0], macs_frac=share + extra[1])


def frames(
    seed: int, num_sequences: int = 5, num_steps: int = 12, hit: float = 0.8, **columns: Any
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    draw = np.random.default_rng(seed)
    scored = scored_steps(draw, num_sequences, num_steps, **columns)
    candidates = candidate_rows(draw, scored, hit)
    return candidates, scored, vocab_rows(draw, candidates)


def told(parts: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]) -> pd.DataFrame:
    candidates, scored, vocab = parts
    columns = candidate_stats(Tries.of(candidates, scored), vocab, seed=3)
    found: pd.DataFrame = schema.CANDIDATE_STATS.build(len(columns["value"]), columns).to_pandas()
    texts = found.select_dtypes("category").columns
    return found.astype(dict.fromkeys(texts, object))


def groups_of(step: dict[Any, Any], number: int) -> dict[str, str]:
    """Return the group of a step in each grouping."""
    high = 1
    while high < number:
        high *= 2
    low, name = 0.0, ">= 4 nats"
    for end in (0.5, 1.0, 2.0, 4.0):
        if low <= step["entropy_nats"] < end:
            name = f"{low:g}-{end:g} nats"
        low = end
    groups = {name: step[name] for name in ("domain", "bucket", "class")}
    groups |= {"all": "all", "entropy": name}
    groups["position"] = str(high) if high < 3 else f"{high // 2 + 1}-{high}"
    if not math.isnan(step["regime"]):
        groups["regime"] = f"{step['regime']:.0f}"
    return groups


def by_hand(parts: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]) -> dict[Any, Any]:
    """Return the rows of each cell and group, row by row, in the order of sequence and position."""
    candidates, scored, _ = parts
    steps: dict[tuple[str, int], dict[Any, Any]] = {}
    seen: dict[str, int] = {}
    for step in scored.sort_values(["sequence_id", "position"]).to_dict("records"):
        name = step["sequence_id"]
        seen[name] = seen.get(name, 0) + 1
        steps[name, step["position"]] = step | {"groups": groups_of(step, seen[name])}
    found: dict[Any, list[dict[Any, Any]]] = {}
    for row in candidates.sort_values(["sequence_id", "position"]).to_dict("records"):
        step = steps[row["sequence_id"], row["position"]]
        cell = tuple(row[name] for name in CELL)
        for kind, group in step["groups"].items():
            found.setdefault((*cell, kind, group), []).append(step | row)
    return found


def weighted(values: dict[str, list[float]]) -> tuple[Any, Any, Any, int]:
    """Return the mean over steps with its interval over sequences, from values by sequence."""
    names = sorted(values)
    made = bootstrap_mean(
        [float(np.mean(values[name])) for name in names],
        seed=3,
        weights=[len(values[name]) for name in names],
    )
    return made.mean, made.low, made.high, made.n


def grouped(rows: list[dict[Any, Any]], value: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["sequence_id"], []).append(float(value(row)))
    return found


def same(row: Any, expected: tuple[Any, Any, Any, int]) -> None:
    for name, value in zip(("value", "low", "high", "n"), expected, strict=True):
        if value is None or math.isnan(value):
            assert math.isnan(row[name])
        else:
            assert row[name] == pytest.approx(value, rel=1e-9)


@settings(max_examples=5)
@given(st.integers(0, 2**20), st.integers(1, 6), st.sampled_from([1, 9]))
def test_means_are_those_of_plain_loops_with_intervals_over_sequences(
    seed: int, num_sequences: int, num_steps: int
) -> None:
    parts = frames(seed, num_sequences, num_steps)
    stats, expected = told(parts), by_hand(parts)
    keys = [*CELL, "grouping", "group"]
    assert set(stats[keys].itertuples(index=False, name=None)) == set(expected)
    read: dict[str, Any] = {
        name: lambda row, column=column: row[column] for name, column in MEANS.items()
    }
    read["mass"] = lambda row: math.exp(-row["neg_log_mass_nats"])
    for row in stats.to_dict("records"):
        rows = expected[tuple(row[name] for name in keys)]
        assert row["unit"] == UNITS[row["statistic"]]
        if row["statistic"] in read:
            assert row["num_steps"] == len(rows)
            same(row, weighted(grouped(rows, read[row["statistic"]])))
        if row["statistic"] == "set_size_p95":
            assert row["value"] == pytest.approx(np.percentile([x["set_size"] for x in rows], 95))


@settings(max_examples=4)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_what_is_told_of_whole_sequences_is_that_of_plain_loops(seed: int, hit: float) -> None:
    parts = frames(seed, 4, 10, hit)
    costs = {
        tuple(row[name] for name in (*CELL, "sequence_id")): row
        for row in parts[2].to_dict("records")
    }
    rows_of = by_hand(parts)
    for row in told(parts).to_dict("records"):
        if row["grouping"] not in ("all", "domain"):
            continue
        rows = rows_of[tuple(row[name] for name in (*CELL, "grouping", "group"))]
        name = row["statistic"]
        if name.removeprefix("neg_log_mass_") in PERCENTS:
            finite = [x["neg_log_mass_nats"] for x in rows]
            if np.isfinite(finite).all():
                at = PERCENTS[name.removeprefix("neg_log_mass_")]
                assert row["value"] == pytest.approx(np.percentile(finite, at))
        elif name.startswith("ppl_"):
            column = {"ppl_full": "nll_full", "ppl_backoff": "nll_backoff"}[name]
            given_rows = [x for x in rows if x["is_given"]]
            assert row["num_steps"] == len(given_rows)
            mean, low, high, n = weighted(grouped(given_rows, lambda x, c=column: x[c]))
            mean, low, high = (None if x is None else math.exp(x) for x in (mean, low, high))
            same(row, (mean, low, high, n))
        elif name in ("cost_frac", "macs_frac"):
            cell = tuple(row[one] for one in CELL)
            spent = grouped(rows, lambda x, c=cell, one=name: costs[(*c, x["sequence_id"])][one])
            same(row, weighted(spent))
        elif name == "run_mean":
            lengths = [
                length
                for hits in grouped(rows, lambda x: x["hit_argmax"]).values()
                for length in stretches(hits)
            ]
            assert (
                row["value"] == pytest.approx(np.mean(lengths))
                if lengths
                else np.isnan(row["value"])
            )
        elif name == "run_if_independent":
            share = np.mean([x["hit_argmax"] for x in rows])
            assert (
                row["value"] == pytest.approx(1 / (1 - share))
                if share < 1
                else np.isnan(row["value"])
            )


def stretches(hits: list[float]) -> list[int]:
    """Return the lengths of runs of hits."""
    found, length = [], 0
    for hit in [*hits, 0.0]:
        if hit:
            length += 1
        elif length:
            found.append(length)
            length = 0
    return found


@pytest.mark.parametrize("missed", [(), (100,), (0, 299), (10, 280)])
def test_256_exact_steps_in_a_row_are_counted_over_windows_of_that_length(
    missed: tuple[int, ...],
) -> None:
    candidates, scored, vocab = frames(0, 1, 300, hit=1.0)
    cell = candidates["size"] == SIZES[0]
    position = sorted(scored["position"])
    gone = candidates["position"].isin([position[one] for one in missed])
    candidates.loc[gone, "hit_argmax"] = False
    stats = told((candidates[cell], scored, vocab))
    chosen = stats[(stats["statistic"] == "exact_256_frac") & (stats["grouping"] == "all")]
    windows = [range(one, one + 256) for one in range(300 - 255)]
    share = np.mean([not set(missed) & set(one) for one in windows])
    assert chosen["value"].tolist() == pytest.approx([share] * len(SCHEMES))


def test_sequences_shorter_than_256_steps_do_not_tell_of_256() -> None:
    stats = told(frames(1, 3, 20))
    short = stats[stats["statistic"] == "exact_256_frac"]
    assert short["value"].isna().all()
    assert (short["n"] == 0).all()


def test_a_models_own_text_has_no_perplexity() -> None:
    stats = told(frames(2, 3, 8, is_given=False))
    assert not stats["statistic"].str.startswith("ppl_").any()
    assert stats["statistic"].isin(UNITS).all()


def test_an_infinite_value_stays_infinite_and_leaves_draws_without_it_alone() -> None:
    over = np.array([[1.0, 2.0, np.inf, 3.0], [1.0, 2.0, 4.0, 3.0]])
    found = quotients(over, np.ones(4), seed=0)
    assert found.value.tolist() == [np.inf, 2.5]
    assert found.high[0] == np.inf
    assert np.isfinite(found.low[0])
    made = bootstrap_mean(over[0], seed=0)
    assert (found.low[0], found.high[0]) == (made.low, made.high)


def test_sequences_that_do_not_count_are_not_drawn() -> None:
    draw = np.random.default_rng(5)
    over, under = draw.random((6, 7)), draw.integers(0, 3, size=(6, 7)).astype(float)
    over[under == 0] = 0
    found = quotients(over, under, seed=9)
    for place in range(6):
        there = under[place] > 0
        made = bootstrap_mean(
            over[place][there] / under[place][there], seed=9, weights=under[place][there]
        )
        assert found.n[place] == made.n
        assert found.value[place] == pytest.approx(made.mean)
        if made.low is None:
            assert np.isnan(found.low[place])
        else:
            assert (found.low[place], found.high[place]) == pytest.approx((made.low, made.high))


def test_steps_that_are_not_known_and_steps_without_a_row_are_left_out() -> None:
    candidates, scored, _ = frames(4, 3, 6)
    tries = Tries.of(candidates, scored[scored["sequence_id"] != "s02#0"])
    assert "s02#0" not in tries.sequences
    assert len(tries.cell_X) == (candidates["sequence_id"] != "s02#0").sum()
    pairs = list(zip(tries.cell_X, tries.step_X, strict=True))
    assert pairs == sorted(set(pairs))


def test_statistics_do_not_hang_on_the_order_of_rows_or_on_their_type() -> None:
    candidates, scored, vocab = frames(6, 4, 8)
    texts = ["estimator", "controller", "fit", "sequence_id"]
    tail = candidates.iloc[1:].sample(frac=1, random_state=1)
    other = pd.concat([candidates.iloc[:1], tail]).astype(dict.fromkeys(texts, "category"))
    one, two = told((candidates, scored, vocab)), told((other, scored.iloc[::-1], vocab))
    by = [*CELL, "grouping", "group", "statistic"]
    one, two = (frame.sort_values(by).reset_index(drop=True) for frame in (one, two))
    pd.testing.assert_frame_equal(one, two, rtol=1e-12)


def test_a_step_is_in_one_group_of_each_grouping() -> None:
    scored = frames(7, 3, 40)[1]
    for grouping in step_groups(scored):
        assert grouping.code_S.max() < len(grouping.groups)
        assert len(set(grouping.groups)) == len(grouping.groups)
        assert (grouping.code_S >= 0).all() or grouping.name == "regime"


def test_rows_whose_steps_are_all_unknown_tell_nothing() -> None:
    candidates, scored, vocab = frames(8, 2, 5)
    stats = told((candidates.assign(position=candidates["position"] + 500), scored, vocab))
    assert stats.empty
