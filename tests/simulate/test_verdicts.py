"""Verdicts by domain, chosen on one half and judged on the other, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulate import test_candidate_stats
from tests.simulate.test_candidate_stats import scored_steps
from tracekit import schema
from tracekit.measure.stats import bootstrap_mean
from tracekit.simulate.tries import CELL, Tries
from tracekit.simulate.verdicts import steps_needed, verdicts

Parts = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]

METHODS = {"previous:top=256": "lookup:longest=4", "rate:gain=4,level=0,window=8": "drift"}
"""What stands for the schemes of ``frames`` that no decoder could run."""


def frames(
    seed: int, num_sequences: int = 5, num_steps: int = 12, hit: float = 0.8, num_samples: int = 1
) -> Parts:
    """Return made-up steps of schemes that may be named, and of a bound; samples follow each other."""
    names = {
        f"s{number:02}#0": f"s{(number - 1) // num_samples:02}#{(number - 1) % num_samples}"
        for number in range(1, num_sequences + 1)
    }
    parts = test_candidate_stats.frames(seed, num_sequences, num_steps, hit)
    candidates, scored, vocab = (one.replace({"sequence_id": names}) for one in parts)
    if num_samples > 1:  # a prompt has one domain
        domain = scored["sequence_id"].str[1:3].astype(int).mod(2).map({0: "story", 1: "code"})
        scored = scored.assign(domain=domain)
    text = {"estimator": METHODS, "controller": METHODS}
    return candidates.replace(text), scored, vocab.replace(text)


def told(parts: Parts) -> dict[tuple[str, float], dict[str, Any]]:
    candidates, scored, vocab = parts
    columns = verdicts(Tries.of(candidates, scored), vocab, seed=3)
    rows = schema.VERDICTS.build(len(columns["domain"]), columns).to_pylist()
    return {(row["domain"], row["hit_level"]): row for row in rows}


def halves(parts: Parts) -> dict[str, str]:
    """Return the half of each sequence: prompts in turn, domain after domain."""
    _, scored, vocab = parts
    domains = dict(zip(scored["sequence_id"], scored["domain"], strict=True))
    prompts: list[str] = []
    for domain in sorted(set(domains.values())):
        for name in vocab["sequence_id"]:
            if domains[name] == domain and name.split("#")[0] not in prompts:
                prompts.append(name.split("#")[0])
    return {
        name: ("choosing", "judging")[prompts.index(name.split("#")[0]) % 2]
        for name in vocab["sequence_id"]
    }


def on_half(part: pd.DataFrame, costs: dict[str, float]) -> dict[str, Any]:
    """Return what one cell did on the steps of one half."""
    prompt = part["sequence_id"].str.split("#").str[0]
    hits = [part.loc[prompt == name, "hit_argmax"] for name in sorted(prompt.unique())]
    found = bootstrap_mean([one.mean() for one in hits], seed=3, weights=[len(one) for one in hits])
    low = found.low
    if low is not None and part["hit_argmax"].all():
        low = min(low, 1 - 3 / len(part))
    cost = part["sequence_id"].map(costs).mean() if len(part) else np.inf
    return {
        "cost": cost,
        "num": len(part),
        "hit": found.mean,
        "low": low,
        "high": found.high,
        "n": found.n,
        "set": part["set_size"].mean(),
    }


def cells_of(parts: Parts, domain: str) -> list[dict[str, Any]]:
    """Return the cells that a decoder could run with what they did on either half."""
    candidates, scored, vocab = parts
    half = halves(parts)
    frame = candidates.merge(scored[["sequence_id", "position", "domain"]])
    cells = []
    for cell, part in frame.groupby(list(CELL), sort=False):
        own = part if domain == "all" else part[part["domain"] == domain]
        if cell[0] == "oracle" or cell[2] not in ("asked", "others") or not len(own):
            continue
        row: dict[Any, Any] = dict(zip(CELL, cell, strict=True))
        rows = vocab[(vocab[list(CELL)] == pd.Series(row)).all(axis=1)]
        costs = dict(zip(rows["sequence_id"], rows["cost_frac"], strict=True))
        for name in ("choosing", "judging"):
            row[name] = on_half(own[own["sequence_id"].map(half) == name], costs)
        cells.append(row)
    return cells


def by_hand(parts: Parts, domain: str, level: float) -> tuple[str, list[dict[str, Any]]]:
    """Return the verdict, and the cells among which the one that is named must be."""
    cells = cells_of(parts, domain)
    half = "choosing" if any(one["choosing"]["num"] for one in cells) else "judging"
    tried = [one for one in cells if one[half]["num"]]
    cheap = [one for one in tried if one[half]["cost"] < 1] or tried
    most = max(one[half]["hit"] for one in cheap)
    best = [one for one in cheap if one[half]["hit"] == most]
    able = [one for one in cells if min(one["choosing"]["n"], one["judging"]["n"]) >= 4]
    if not able:
        return "too few prompts", best
    able = [
        one
        for one in able
        if min(one["choosing"]["num"], one["judging"]["num"]) >= steps_needed(level)
    ]
    if not able:
        return "not enough steps", best

    def keeps(half: dict[str, Any]) -> bool:
        return half["low"] is not None and half["low"] >= level and half["cost"] < 1

    kept = [one for one in able if keeps(one["choosing"])]
    if not kept:
        return "not suitable", best
    chosen = min(kept, key=lambda one: one["choosing"]["cost"])
    return ("kept" if keeps(chosen["judging"]) else "not kept on the other half"), [chosen]


@settings(max_examples=12)
@given(
    st.integers(0, 2**20),
    st.sampled_from([3, 22]),
    st.sampled_from([5, 60]),
    st.sampled_from([0.5, 0.992, 0.995, 1.0]),
    st.sampled_from([1, 2]),
)
def test_verdicts_are_those_of_plain_loops(
    seed: int, num_sequences: int, num_steps: int, hit: float, num_samples: int
) -> None:
    parts = frames(seed, num_sequences, num_steps, hit, num_samples)
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
        judging, choosing = named[0]["judging"], named[0]["choosing"]
        told_of = {
            "hit_argmax": judging["hit"],
            "low": judging["low"],
            "high": judging["high"],
            "set_size_mean": judging["set"] if judging["num"] else None,
            "cost_frac": judging["cost"] if judging["num"] else None,
            "hit_choosing": choosing["hit"],
            "low_choosing": choosing["low"],
        }
        for name, value in told_of.items():
            assert row[name] == (None if value is None else pytest.approx(value))
        assert (row["n"], row["num_steps"]) == (judging["n"], judging["num"])
        assert row["n_choosing"] == choosing["n"]


def one_domain(
    hit: dict[str, dict[str, float]], num_prompts: int = 16, num_samples: int = 1
) -> Parts:
    """Return two cells, ``lookup`` cheaper than ``frequency``, that hit so often on each half.

    Prompts of even number choose. A hit share holds on each sequence alike.
    """
    names = [f"s{prompt:02}#{one}" for prompt in range(num_prompts) for one in range(num_samples)]
    position = np.arange(1, 101)
    scored = scored_steps(np.random.default_rng(0), 1, 100)
    scored = pd.concat(
        [scored.assign(sequence_id=name, position=position) for name in names], ignore_index=True
    )
    cells, costs = [], []
    for number, (estimator, shares) in enumerate(hit.items()):
        shared = {"estimator": estimator, "controller": "fixed", "fit": "asked", "size": 8}
        half = scored["sequence_id"].str[1:3].astype(int) % 2
        share = np.where(half == 0, shares["choosing"], shares["judging"])
        cells.append(
            pd.DataFrame(
                shared
                | {
                    "sequence_id": scored["sequence_id"],
                    "position": scored["position"],
                    "set_size": 8,
                    "hit_argmax": scored["position"] <= 100 * share,
                }
            )
        )
        cost_frac = 0.1 * (1 + number)
        costs.append(pd.DataFrame(shared | {"sequence_id": names, "cost_frac": cost_frac}))
    return pd.concat(cells, ignore_index=True), scored, pd.concat(costs, ignore_index=True)


LUCKY = {
    "lookup:longest=4": {"choosing": 1.0, "judging": 0.9},
    "frequency:source=all": {"choosing": 1.0, "judging": 1.0},
}


@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_lucky_cell_of_the_half_that_chooses_is_caught_by_the_other(num_samples: int) -> None:
    row = told(one_domain(LUCKY, num_samples=num_samples))["story", 0.99]
    assert row["verdict"] == "not kept on the other half"
    assert row["estimator"] == "lookup:longest=4"
    num = 800 * num_samples
    assert (row["hit_choosing"], row["low_choosing"]) == (1, 1 - 3 / num)
    assert (row["hit_argmax"], row["low"]) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (row["n_choosing"], row["n"], row["num_steps"]) == (8, 8, num)
    assert row["why"] == (
        f"not kept on the other half: the lower end of the interval is {1 - 3 / num:.5g} (1 - 3 / "
        f"{num} steps, none missed) on the 8 prompts that chose it and 0.9 on the 8 prompts that "
        "judge it, where it reads 0.1 of the full head"
    )


def test_what_is_kept_on_both_halves_is_kept() -> None:
    honest = {name: LUCKY[name] for name in ("frequency:source=all",)}
    row = told(one_domain(honest))["story", 0.99]
    assert row["verdict"] == "kept"
    assert row["why"].startswith(
        "kept: the lower end of the interval is 0.99625 (1 - 3 / 800 steps, none missed) on the 8 "
    )


def test_what_reads_more_than_the_head_where_it_is_judged_is_not_kept() -> None:
    candidates, scored, vocab = one_domain(LUCKY)
    judged = vocab["sequence_id"].str[1:3].astype(int) % 2 == 1
    dear = vocab.assign(cost_frac=vocab["cost_frac"] + 0.95 * judged)
    honest = candidates["estimator"] != "lookup:longest=4"
    row = told((candidates[honest], scored, dear))["story", 0.99]
    assert row["verdict"] == "not kept on the other half"
    assert row["why"].endswith("where it reads 1.15 of the full head")


@pytest.mark.parametrize("hit", [0.5, 0.999, 1.0])
def test_what_the_half_that_judges_saw_never_changes_what_is_named(hit: float) -> None:
    parts = frames(4, 22, 60, hit)
    candidates, scored, vocab = parts
    judged = candidates["sequence_id"].map(halves(parts)) == "judging"
    turned = candidates.assign(hit_argmax=candidates["hit_argmax"] ^ judged)
    one, two = told(parts), told((turned, scored, vocab))
    own = (*CELL, "n_choosing", "hit_choosing", "low_choosing")
    for key, row in one.items():
        assert {name: row[name] for name in own} == {name: two[key][name] for name in own}


def test_99_9_percent_takes_3000_steps_and_99_percent_300() -> None:
    assert steps_needed(0.999) == 3000
    assert steps_needed(0.99) == 300


def test_the_cheapest_that_keeps_a_level_is_named() -> None:
    parts = frames(0, 16, 40, hit=1.0)
    row = told(parts)["all", 0.99]
    assert row["verdict"] == "kept"
    assert row["low"] == 1 - 3 / row["num_steps"]
    assert row["high"] == 1
    candidates, scored, vocab = parts
    dear = vocab.assign(cost_frac=vocab["cost_frac"] + (vocab["estimator"] == row["estimator"]))
    other = told((candidates, scored, dear))["all", 0.99]
    assert other["verdict"] == "kept"
    assert other["estimator"] != row["estimator"]


def test_sets_that_read_as_much_as_the_head_keep_nothing() -> None:
    candidates, scored, vocab = frames(0, 16, 40, hit=1.0)
    row = told((candidates, scored, vocab.assign(cost_frac=1.0)))["all", 0.99]
    assert row["verdict"] == "not suitable"
    assert row["hit_argmax"] == 1
    assert row["hit_choosing"] == 1


@pytest.mark.parametrize("fit", ["own", "shuffled"])
def test_bounds_and_sizes_fitted_on_the_sequence_itself_are_never_named(fit: str) -> None:
    candidates, scored, vocab = frames(0, 16, 40, hit=1.0)
    own, dear = (frame.replace({"fit": {"others": fit}}) for frame in (candidates, vocab))
    is_left = [frame["estimator"] != "frequency:source=all" for frame in (own, dear)]
    found = told((own[is_left[0]], scored, dear[is_left[1]]))
    for row in found.values():
        assert row["verdict"] == "nothing to judge"
        assert row["estimator"] is None
        assert row["n"] is None


@pytest.mark.parametrize(
    ("estimator", "controller"),
    [("previous:top=256", "fixed"), ("lookup:longest=4", "entropy"), ("oracle", "fixed")],
)
def test_what_a_decoder_that_always_prunes_cannot_run_is_never_named(
    estimator: str, controller: str
) -> None:
    candidates, scored, vocab = one_domain({"lookup:longest=4": LUCKY["frequency:source=all"]})
    named = {"estimator": estimator, "controller": controller}
    row = told((candidates.assign(**named), scored, vocab.assign(**named)))["story", 0.99]
    assert row["verdict"] == "nothing to judge"


def test_below_8_prompts_there_is_no_verdict() -> None:
    row = told(one_domain(LUCKY, num_prompts=7))["story", 0.99]
    assert row["verdict"] == "too few prompts"
    assert row["why"] == "too few prompts: 4 choose and 3 judge, 4 each needed"
    assert row["low"] is not None
    assert told(one_domain(LUCKY, num_prompts=8))["story", 0.99]["verdict"].startswith("not kept")
    few = told(one_domain(LUCKY, num_prompts=1))["story", 0.99]
    assert (few["n_choosing"], few["n"], few["num_steps"]) == (1, 0, 0)
    assert few["hit_argmax"] is few["cost_frac"] is few["low_choosing"] is None


def test_8_samples_of_2_prompts_have_no_verdict() -> None:
    row = told(one_domain(LUCKY, num_prompts=2, num_samples=8))["story", 0.99]
    assert row["verdict"] == "too few prompts"
    assert (row["n_choosing"], row["n"], row["num_steps"]) == (1, 1, 800)
    assert row["low"] is row["low_choosing"] is None


def test_samples_of_one_prompt_never_judge_each_other() -> None:
    row = told(one_domain(LUCKY, num_prompts=1, num_samples=20))["story", 0.99]
    assert (row["n_choosing"], row["n"]) == (1, 0)
    assert row["verdict"] == "too few prompts"


def test_more_samples_of_the_same_prompts_leave_the_interval_as_wide() -> None:
    share = {"choosing": 0.95, "judging": 0.95}
    one, many = (
        told(uneven(one_domain({"lookup:longest=4": share}, num_samples=num)))["story", 0.99]
        for num in (1, 5)
    )
    assert one["low"] < one["hit_argmax"] < one["high"]
    for name in ("low", "hit_argmax", "high", "low_choosing"):
        assert many[name] == pytest.approx(one[name])


def uneven(parts: Parts) -> Parts:
    """Return steps of which every fourth prompt hits at none, whatever the sample."""
    candidates, scored, vocab = parts
    misses = candidates["sequence_id"].str[1:3].astype(int) % 8 >= 6
    return candidates.assign(hit_argmax=candidates["hit_argmax"] & ~misses), scored, vocab


def test_a_domain_whose_only_prompt_judges_names_the_best_there() -> None:
    candidates, scored, vocab = one_domain(
        {
            "random:seed=0": {"choosing": 0.0, "judging": 0.0},
            "lookup:longest=4": {"choosing": 0.9, "judging": 0.9},
        },
        num_prompts=4,
    )
    alone = scored["sequence_id"] == "s03#0"
    scored = scored.assign(domain=scored["domain"].mask(alone, "tale"))
    row = told((candidates, scored, vocab))["tale", 0.99]
    assert (row["n_choosing"], row["n"]) == (0, 1)
    assert row["estimator"] == "lookup:longest=4"
    assert row["hit_argmax"] == pytest.approx(0.9)
    assert row["hit_choosing"] is None


def test_what_was_not_tried_where_is_chosen_is_not_named() -> None:
    candidates, scored, vocab = one_domain(LUCKY, num_prompts=4)
    judges = candidates["sequence_id"].isin(["s01#0", "s03#0"])
    kept = judges | (candidates["estimator"] != "lookup:longest=4")
    row = told((candidates[kept], scored, vocab.assign(cost_frac=1.5)))["story", 0.99]
    assert row["estimator"] == "frequency:source=all"
    assert row["hit_choosing"] == 1


def test_the_rule_of_three_counts_the_steps_of_either_half() -> None:
    row = told(one_domain(LUCKY, num_prompts=16))["story", 0.999]
    assert row["verdict"] == "not enough steps"
    assert row["why"] == (
        "not enough steps: 800 choose and 800 judge, 3000 each needed without a miss"
    )


def test_exactly_the_steps_that_a_level_needs_are_enough() -> None:
    candidates, scored, vocab = one_domain({"lookup:longest=4": {"choosing": 1, "judging": 1}}, 8)
    some = [one[one["position"] <= 75] for one in (candidates, scored)]
    row = told((some[0], some[1], vocab))["story", 0.99]
    assert (row["verdict"], row["num_steps"], row["low"]) == ("kept", 300, 0.99)
