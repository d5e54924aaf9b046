"""Statistics of scored steps by group, against plain loops over made-up steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit import schema
from tracekit.simulate.logit_stats import ENTROPY_ENDS, OF_TEXT, logit_stats
from tracekit.simulate.steps import STEP_ENDS

DOMAINS = {"a": "story", "b": "code", "c": "story", "d": "code"}
LENGTHS = {"a": "< 256", "b": "256 - 1k", "c": "< 256", "d": "< 256"}
POLICIES = {"h2o:kept=0.5": 0.5, "knorm:kept=0.3": 0.3}


def made(seed: int = 0, num_steps: int = 40, **columns: Any) -> pd.DataFrame:
    """Return rows of ``schema.LOGITS``: 4 sequences of unequal length under 2 policies."""
    draw, frames = np.random.default_rng(seed), []
    for policy in POLICIES:
        for number, name in enumerate(DOMAINS):
            size = num_steps + 7 * number
            full, pruned = draw.gamma(2.0, size=(2, size))
            frames.append(
                pd.DataFrame(
                    {
                        "sequence_id": name,
                        "domain": DOMAINS[name],
                        "policy": policy,
                        "family": policy.split(":")[0],
                        "position": np.arange(size) + 30,
                        "distance": np.arange(size) + 1,
                        "nll_full": full,
                        "nll_pruned": pruned,
                        "kl_nats": draw.gamma(1.0, size=size),
                        "jsd_nats": draw.uniform(0, np.log(2), size=size),
                        "delta_p": np.exp(-pruned) - np.exp(-full),
                        "entropy_full_nats": draw.uniform(0, 6, size=size),
                        "top1_margin_full": draw.gamma(1.0, size=size),
                        "margin_pruned": draw.normal(size=size),
                        "same_top": draw.random(size) < 0.7,
                        "hit": draw.random(size) < 0.8,
                        "hit_full": draw.random(size) < 0.9,
                        "is_given": number % 2 == 0,
                        "is_answer": False,
                        "is_needle": draw.random(size) < 0.2,
                    }
                    | columns
                )
            )
    return pd.concat(frames, ignore_index=True)


def kv_of(logits: pd.DataFrame) -> pd.DataFrame:
    """Return rows of ``schema.KV_RESULTS`` of the same cells, with those of another level."""
    cells = logits[["sequence_id", "policy"]].drop_duplicates()
    kept = cells["policy"].map(POLICIES) + 0.1 * (cells["sequence_id"] == "b")
    rows = cells.assign(
        bucket=cells["sequence_id"].map(LENGTHS), level="propagated", kept_frac=kept
    )
    return pd.concat([rows, rows.assign(level="local", kept_frac=0.9)], ignore_index=True)


def stats_of(logits: pd.DataFrame, convention: str = "tracekit") -> pd.DataFrame:
    columns = logit_stats(logits, kv_of(logits), convention=convention, seed=3)
    stats: pd.DataFrame = schema.LOGIT_STATS.build(len(columns["policy"]), columns).to_pandas()
    return stats


def value(stats: pd.DataFrame, statistic: str, grouping: str = "all", group: str = "all") -> Any:
    """Return the row of one statistic of the first policy."""
    chosen = stats[
        (stats["policy"] == "h2o:kept=0.5")
        & (stats["statistic"] == statistic)
        & (stats["grouping"] == grouping)
        & (stats["group"] == group)
    ]
    assert len(chosen) == 1
    return chosen.iloc[0]


def groups_by_hand(logits: pd.DataFrame) -> dict[tuple[str, str], list[int]]:
    """Return the rows of each group of the first policy, step by step."""
    found: dict[tuple[str, str], list[int]] = {}
    own = logits[logits["policy"] == "h2o:kept=0.5"]
    for number, (_, step) in zip(own.index.tolist(), own.iterrows(), strict=True):
        names = [
            ("all", "all"),
            ("domain", step["domain"]),
            ("bucket", LENGTHS[step["sequence_id"]]),
        ]
        names.append(("needle", "in the needle" if step["is_needle"] else "elsewhere"))
        low, name = 0, f">{STEP_ENDS[-1]}"
        for end in STEP_ENDS:
            if low < step["distance"] <= end:
                name = f"{low + 1}-{end}"
            low = end
        names.append(("distance", name))
        least, name = 0.0, f">= {ENTROPY_ENDS[-1]:g} nats"
        for most in ENTROPY_ENDS:
            if least <= step["entropy_full_nats"] < most:
                name = f"{least:g}-{most:g} nats"
            least = most
        names.append(("entropy", name))
        for one in names:
            found.setdefault(one, []).append(number)
    return found


@settings(max_examples=6)
@given(st.integers(0, 2**20), st.sampled_from([1, 5, 80]))
def test_every_group_has_the_steps_that_belong_to_it(seed: int, num_steps: int) -> None:
    logits = made(seed, num_steps)
    stats = stats_of(logits)
    groups = groups_by_hand(logits)
    own = stats[stats["policy"] == "h2o:kept=0.5"]
    assert set(zip(own["grouping"], own["group"], strict=True)) == set(groups)
    for (grouping, group), rows in groups.items():
        steps = logits.loc[rows]
        kl = value(stats, "kl_mean", grouping, group)
        assert kl["value"] == pytest.approx(
            np.mean([step["kl_nats"] for _, step in steps.iterrows()])
        )
        by_sequence = [np.mean(part["kl_nats"]) for _, part in steps.groupby("sequence_id")]
        assert kl["macro"] == pytest.approx(np.mean(by_sequence))
        assert kl["n"] == len(by_sequence)
        assert kl["num_steps"] == len(steps)
        flips = value(stats, "num_flips", grouping, group)
        assert flips["value"] == (~steps["same_top"]).sum()


def test_perplexity_is_told_of_given_text_alone() -> None:
    logits = made()
    stats = stats_of(logits)
    given = logits[(logits["policy"] == "h2o:kept=0.5") & logits["is_given"]]
    full = value(stats, "ppl_full")
    assert full["value"] == pytest.approx(np.exp(np.mean(given["nll_full"])))
    assert (full["n"], full["num_steps"]) == (2, len(given))
    assert value(stats, "kl_mean")["n"] == 4


def test_perplexity_of_text_that_the_model_made_is_null_and_all_else_is_told() -> None:
    stats = stats_of(made(is_given=False))
    of_text = stats["statistic"].astype(str).str.startswith(OF_TEXT)
    assert of_text.any()
    assert stats.loc[of_text, ["value", "macro", "low", "high", "error"]].isna().all(axis=None)
    assert (stats.loc[of_text, "num_steps"] == 0).all()
    told = stats[
        stats["statistic"].isin(["kl_mean", "kl_p99", "same_top", "jsd_mean", "num_flips"])
    ]
    assert told["value"].notna().all()


def test_kept_fractions_are_means_over_sequences_of_this_level() -> None:
    stats = stats_of(made())
    for policy, kept in POLICIES.items():
        own = stats.loc[stats["policy"] == policy, "kept_frac"]
        assert np.allclose(own, kept + 0.1 / 4)


@pytest.mark.parametrize("convention", ["tracekit", "llama.cpp"])
def test_errors_are_those_of_the_convention(convention: str) -> None:
    row = value(stats_of(made(), convention), "kl_mean")
    assert row["convention"] == convention
    assert pd.isna(row["error"]) == (convention == "tracekit")
    assert pd.isna(row["low"]) == pd.isna(row["high"]) == (convention == "llama.cpp")
    if convention == "llama.cpp":
        logits = made()
        kl = logits.loc[logits["policy"] == "h2o:kept=0.5", "kl_nats"]
        assert row["error"] == pytest.approx(np.std(kl) / np.sqrt(len(kl) - 1))


def test_fewer_than_three_sequences_have_no_interval() -> None:
    row = value(stats_of(made()), "kl_mean", "domain", "story")
    assert row["n"] == 2
    assert pd.isna(row["low"])
    assert not pd.isna(value(stats_of(made()), "kl_mean")["low"])


def test_an_answer_is_right_if_each_of_its_tokens_is() -> None:
    logits = made()
    logits["is_answer"] = logits["position"].between(33, 36) & (logits["sequence_id"] != "d")
    stats = stats_of(logits)
    own = logits[(logits["policy"] == "h2o:kept=0.5") & logits["is_answer"]]
    for name, column in (("exact_match_pruned", "hit"), ("exact_match_full", "hit_full")):
        right = [all(part[column]) for _, part in own.groupby("sequence_id")]
        row = value(stats, name)
        assert row["value"] == pytest.approx(np.mean(right))
        assert (row["n"], row["num_steps"]) == (3, len(own))


def test_without_a_marked_answer_exact_match_is_null() -> None:
    stats = stats_of(made())
    for name in ("exact_match_pruned", "exact_match_full"):
        assert pd.isna(value(stats, name)["value"])


def test_without_a_needle_there_is_no_group_of_it() -> None:
    assert "needle" not in set(stats_of(made(is_needle=False))["grouping"])


def test_steps_without_a_distribution_are_left_out_and_counted() -> None:
    logits = made()
    lost = logits.index[[0, 5, 50]]
    floats = [name for name, kind in logits.dtypes.items() if kind == np.float64]
    logits.loc[lost, floats] = np.nan
    logits.loc[lost, ["same_top", "hit", "hit_full"]] = False
    stats = stats_of(logits)
    there = logits[(logits["policy"] == "h2o:kept=0.5") & logits["kl_nats"].notna()]
    assert value(stats, "num_left_out")["value"] == 3
    assert value(stats, "kl_mean")["value"] == pytest.approx(there["kl_nats"].mean())
    # A step whose entropy nobody knows is in no bucket of entropy.
    counted = stats[
        (stats["policy"] == "h2o:kept=0.5")
        & (stats["grouping"] == "entropy")
        & (stats["statistic"] == "kl_mean")
    ]
    assert counted["num_steps"].sum() == len(there)
    assert not np.isnan(stats["value"].dropna()).any()


def test_the_same_seed_gives_the_same_intervals() -> None:
    pd.testing.assert_frame_equal(stats_of(made()), stats_of(made()))


def test_without_steps_there_is_no_row() -> None:
    columns = logit_stats(made().head(0), kv_of(made()), convention="tracekit", seed=0)
    assert columns.keys() == {column.name for column in schema.LOGIT_STATS.columns}
    assert not any(columns.values())
