"""Calibration: each statistic against plain loops over cells and over resampled cells."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit import schema
from tracekit.errors import TraceError, UsageError
from tracekit.measure.weighted import median, pearson, ranks, spearman
from tracekit.progress import Silent
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.recorder import record
from tracekit.simulate.calibration import (
    KL_ENDS,
    PowerLaw,
    calibration,
    fit,
)
from tracekit.simulate.calibration_cells import calibration_cells, choose_calibrated
from tracekit.simulate.plan import LEVELS, make_plan
from tracekit.simulate.run import simulate

if TYPE_CHECKING:
    from pathlib import Path

SEED = 5
TARGETS = (0.1, 0.25, 0.5)


def frame_of(cells: pd.DataFrame) -> pd.DataFrame:
    """Return results of all three levels from a row a cell, as they are collected."""
    told = {
        "local": ["output_error"],
        "predicted": ["kl_predicted_nats"],
        "propagated": ["kl_nats", "noise_kl_nats"],
    }
    shared = ["sequence_id", "policy", "family", "target_frac", "causal", "is_idle"]
    parts = []
    for level, names in told.items():
        columns = {name: cells[name].to_list() for name in [*shared, *names]}
        whole = {"level": level, "layer": schema.ALL, "kv_head": schema.ALL, "steps": schema.ANY}
        parts.append(schema.KV_RESULTS.build(len(cells), columns | whole).to_pandas())
    texts = dict.fromkeys(["sequence_id", "policy", "family", "level", "steps"], object)
    frame: pd.DataFrame = pd.concat([part.astype(texts) for part in parts])
    return frame


def made_cells(
    num_sequences: int = 4, num_families: int = 4, *, seed: int = 0, scatter: float = 0.4
) -> pd.DataFrame:
    """Return cells that a power law and a scatter were made with, some of them unfit as evidence."""
    rng = np.random.default_rng(seed)
    rows = []
    for s in range(num_sequences):
        for f in range(num_families):
            for target in TARGETS:
                predicted = float(np.exp(rng.uniform(-8, 1)))
                rows.append(
                    {
                        "sequence_id": f"s{s}#0",
                        "policy": f"p{f}:kept={target:g}",
                        "family": f"p{f}",
                        "target_frac": target,
                        "causal": True,
                        "is_idle": False,
                        "kl_predicted_nats": predicted,
                        "kl_nats": float(1.4 * predicted**1.1 * np.exp(scatter * rng.normal())),
                        "noise_kl_nats": float(np.exp(rng.uniform(-9, -4))),
                        "output_error": float(predicted**0.5 * np.exp(rng.normal())),
                    }
                )
    cells = pd.DataFrame(rows)
    cells.loc[3, "is_idle"] = True
    cells.loc[7, "kl_nats"] = cells["noise_kl_nats"][7]
    cells.loc[8, "kl_predicted_nats"] = cells["kl_predicted_nats"][6]
    cells.loc[8, "kl_nats"] = cells["kl_nats"][6]
    bound = cells[cells["family"] == "p0"].assign(family="oracle", causal=False)
    bound["policy"] = "oracle:kept=" + bound["target_frac"].astype(str)
    return pd.concat([cells, bound], ignore_index=True)


def rows_of(cells: pd.DataFrame) -> dict[tuple[str, str | None, str], dict[str, Any]]:
    columns = calibration(frame_of(cells), seed=SEED).columns
    rows = schema.CALIBRATION.build(len(columns["statistic"]), columns).to_pylist()
    found = {(row["statistic"], row["level"], row["group"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def slow_ranks(values: list[float]) -> list[float]:
    """Return average ranks by counting, for each value, those below it and those like it."""
    return [
        sum(other < value for other in values) + (sum(o == value for o in values) + 1) / 2
        for value in values
    ]


def slow_pearson(x: list[float], y: list[float]) -> float:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xx = sum((one - mx) ** 2 for one in x)
    yy = sum((one - my) ** 2 for one in y)
    if xx == 0 or yy == 0:
        return math.nan
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / math.sqrt(xx * yy)


def slow_spearman(x: list[float], y: list[float]) -> float:
    return slow_pearson(slow_ranks(x), slow_ranks(y))


def slow_line(x: list[float], y: list[float]) -> tuple[float, float]:
    mx, my = sum(x) / len(x), sum(y) / len(y)
    xy = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    b = xy / sum((one - mx) ** 2 for one in x)
    return my - b * mx, b


def slow_draws(names: list[str]) -> list[list[str]]:
    """Return the sequences of each resample, each as often as it was drawn."""
    num = len(names)
    counts = np.random.default_rng(SEED).multinomial(num, np.full(num, 1 / num), 1000)
    return [[n for n, c in zip(names, row, strict=True) for _ in range(c)] for row in counts]


def slow_interval(cells: pd.DataFrame, compute: Any) -> tuple[float, float]:
    """Return the ends of the percentile interval: resampled cells are written out one by one."""
    by_name = {str(name): part for name, part in cells.groupby("sequence_id")}
    values = []
    for names in slow_draws(sorted(by_name)):
        value = compute(pd.concat([by_name[name] for name in names]))
        if not math.isnan(value):
            values.append(value)
    values.sort()
    at = [values[max(0, math.ceil(share * len(values) - 1e-9) - 1)] for share in (0.025, 0.975)]
    return at[0], at[1]


def counted(cells: pd.DataFrame) -> pd.DataFrame:
    return cells[cells["causal"] & ~cells["is_idle"]]


def logged(cells: pd.DataFrame) -> pd.DataFrame:
    part = counted(cells)
    return part[part["kl_nats"] > part["noise_kl_nats"]]


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    # Tables hold float32: the twins work on the same numbers.
    made = made_cells()
    numbers = ["kl_predicted_nats", "kl_nats", "noise_kl_nats", "output_error", "target_frac"]
    return made.astype(dict.fromkeys(numbers, np.float32)).astype(dict.fromkeys(numbers, float))


@pytest.fixture(scope="module")
def rows(cells: pd.DataFrame) -> dict[tuple[str, str | None, str], dict[str, Any]]:
    return rows_of(cells)


weighted = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12
).filter(lambda some: any(weight for *_, weight in some))


@given(weighted)
def test_weighted_statistics_equal_loops_over_values_written_out(
    some: list[tuple[int, int, int]],
) -> None:
    x_N, y_N, weight_N = (np.array(one, dtype=float) for one in zip(*some, strict=True))
    x = [float(a) for a, _, count in some for _ in range(count)]
    y = [float(b) for _, b, count in some for _ in range(count)]
    ranks_N, is_there_N = ranks(x_N, weight_N[None])[0], weight_N > 0
    wanted = dict(zip(x, slow_ranks(x), strict=True))
    assert ranks_N[is_there_N].tolist() == [wanted[one] for one in x_N[is_there_N]]
    assert median(x_N, weight_N[None])[0] == np.median(x)
    for fast, slow in ((spearman, slow_spearman), (pearson, slow_pearson)):
        assert fast(x_N, y_N, weight_N[None])[0] == pytest.approx(slow(x, y), nan_ok=True)


@pytest.mark.parametrize(
    ("level", "name"), [("predicted", "kl_predicted_nats"), ("local", "output_error")]
)
def test_correlations_and_their_intervals_equal_loops(
    cells: pd.DataFrame, rows: dict[Any, Any], level: str, name: str
) -> None:
    part = counted(cells)

    def spearman(some: pd.DataFrame) -> float:
        return slow_spearman(some[name].tolist(), some["kl_nats"].tolist())

    def log_pearson(some: pd.DataFrame) -> float:
        return slow_pearson(np.log(some[name]).tolist(), np.log(some["kl_nats"]).tolist())

    for statistic, some, compute in (
        ("spearman", part, spearman),
        ("log_pearson", logged(cells), log_pearson),
    ):
        row = rows[statistic, level, "all"]
        assert row["value"] == pytest.approx(compute(some))
        assert (row["low"], row["high"]) == pytest.approx(slow_interval(some, compute))
        assert (row["num_cells"], row["num_sequences"]) == (len(some), 4)
    alone = {str(one): spearman(some) for one, some in part.groupby("sequence_id")}
    row = rows["spearman_within", level, "mean"]
    assert row["value"] == pytest.approx(sum(alone.values()) / len(alone))
    lowest = min(alone, key=lambda one: alone[one])
    row = rows["spearman_lowest", level, lowest]
    assert row["value"] == pytest.approx(alone[lowest])
    assert (row["low"], row["num_sequences"]) == (None, 1)


@pytest.mark.parametrize(
    ("level", "name"), [("predicted", "kl_predicted_nats"), ("local", "output_error")]
)
def test_pairs_of_one_target_on_one_sequence_are_counted_as_by_loops(
    cells: pd.DataFrame, rows: dict[Any, Any], level: str, name: str
) -> None:
    right = pairs = tied = near = 0
    some = counted(cells).to_dict("records")
    for i, one in enumerate(some):
        for other in some[i + 1 :]:
            if any(one[key] != other[key] for key in ("sequence_id", "target_frac")):
                continue
            change = one["kl_nats"] - other["kl_nats"]
            told = one[name] - other[name]
            if change == 0 or told == 0:
                tied += 1
            elif abs(change) <= max(one["noise_kl_nats"], other["noise_kl_nats"]):
                near += 1
            else:
                pairs += 1
                right += (change > 0) == (told > 0)
    assert near > 0
    counts = [rows["pairs", level, group]["value"] for group in ("all", "tied", "near noise")]
    assert counts == [pairs, tied, near]
    row = rows["pairs_ordered", level, "all"]
    assert row["value"] == pytest.approx(right / pairs)
    assert row["low"] <= row["value"] <= row["high"]


def test_ties_are_told_apart_from_pairs() -> None:
    cells = made_cells()
    first = cells["policy"].isin(["p1:kept=0.1", "p2:kept=0.1"]) & (cells["sequence_id"] == "s1#0")
    cells.loc[first, "kl_nats"] = 0.25
    cells.loc[first, "output_error"] = [0.1, 0.2]
    found = rows_of(cells)
    assert found["pairs", "predicted", "tied"]["value"] >= 1
    assert found["pairs", "local", "tied"]["value"] >= 1


def test_predictions_run_low_by_the_median_of_each_bucket(
    cells: pd.DataFrame, rows: dict[Any, Any]
) -> None:
    some = logged(cells)
    times = (some["kl_nats"] / some["kl_predicted_nats"]).tolist()
    row = rows["propagated_over_predicted", "predicted", "all"]
    assert row["value"] == pytest.approx(float(np.median(times)))

    def median(part: pd.DataFrame) -> float:
        return float(np.median(part["kl_nats"] / part["kl_predicted_nats"]))

    assert (row["low"], row["high"]) == pytest.approx(slow_interval(some, median))
    names = ["< 0.003", "0.003 - 0.01", "0.01 - 0.03", "0.03 - 0.1", "0.1 - 0.3", "0.3 - 1", ">= 1"]
    lows = (0.0, *KL_ENDS)
    total = 0
    for name, low, high in zip(names, lows, (*KL_ENDS, math.inf), strict=True):
        part = some[(some["kl_predicted_nats"] >= low) & (some["kl_predicted_nats"] < high)]
        found = rows.get(("propagated_over_predicted", "predicted", name))
        assert (found is None) == part.empty
        if found is not None:
            assert found["value"] == pytest.approx(median(part))
            assert found["num_cells"] == len(part)
            assert found["num_sequences"] == part["sequence_id"].nunique()
            assert (found["low"] is None) == (part["sequence_id"].nunique() < 3)
            total += len(part)
    assert total == len(some)


def test_the_law_and_its_error_on_left_out_sequences_equal_loops(
    cells: pd.DataFrame, rows: dict[Any, Any]
) -> None:
    some = logged(cells).assign(
        x=lambda f: np.log(f["kl_predicted_nats"]), y=lambda f: np.log(f["kl_nats"])
    )
    a, b = slow_line(some["x"].tolist(), some["y"].tolist())
    assert rows["power_law_a", "predicted", "all"]["value"] == pytest.approx(a)
    row = rows["power_law_b", "predicted", "all"]
    assert row["value"] == pytest.approx(b)

    def slope(part: pd.DataFrame) -> float:
        return slow_line(part["x"].tolist(), part["y"].tolist())[1]

    assert (row["low"], row["high"]) == pytest.approx(slow_interval(some, slope))
    law = calibration(frame_of(cells), seed=SEED).law
    assert law is not None
    assert (law.a, law.b) == pytest.approx((a, b))
    plain, corrected = [], []
    for name, part in some.groupby("sequence_id"):
        others = some[some["sequence_id"] != name]
        one, other = slow_line(others["x"].tolist(), others["y"].tolist())
        plain += (part["y"] - part["x"]).abs().tolist()
        corrected += (part["y"] - one - other * part["x"]).abs().tolist()
    for group, off in (("as predicted", plain), ("corrected", corrected)):
        row = rows["left_out_factor", "predicted", group]
        assert row["value"] == pytest.approx(math.exp(np.median(off)))
        assert row["num_cells"] == len(some)


def test_a_power_law_without_scatter_is_recovered_exactly() -> None:
    cells = made_cells(scatter=0.0)
    cells = cells[cells["kl_nats"] > cells["noise_kl_nats"]].drop(index=8)
    found = rows_of(cells)
    assert found["power_law_a", "predicted", "all"]["value"] == pytest.approx(
        math.log(1.4), abs=1e-5
    )
    assert found["power_law_b", "predicted", "all"]["value"] == pytest.approx(1.1, abs=1e-5)
    assert found["left_out_factor", "predicted", "corrected"]["value"] == pytest.approx(1, abs=1e-5)
    assert found["left_out_factor", "predicted", "as predicted"]["value"] > 1.1
    assert found["spearman", "predicted", "all"]["value"] == pytest.approx(1)
    law = fit(cells["kl_predicted_nats"], cells["kl_nats"])
    assert law is not None
    np.testing.assert_allclose(
        law.corrected(cells["kl_predicted_nats"]), cells["kl_nats"], rtol=1e-9
    )


def test_a_law_leaves_nothing_nothing_and_null_null() -> None:
    made = PowerLaw(0.3, 1.1).corrected([0.0, math.nan, 1.0])
    assert made[0] == 0
    assert np.isnan(made[1])
    assert made[2] == pytest.approx(math.exp(0.3))


@pytest.mark.parametrize(
    ("predicted", "propagated"), [([], []), ([0.1], [0.2]), ([0.1, 0.1], [1, 2]), ([1, 2], [2, 1])]
)
def test_no_law_is_fitted_where_none_rises(predicted: list[float], propagated: list[float]) -> None:
    assert fit(predicted, propagated) is None


def test_bounds_idle_policies_and_cells_at_the_noise_are_left_out_and_counted(
    cells: pd.DataFrame, rows: dict[Any, Any]
) -> None:
    count = {group: row["value"] for (name, _, group), row in rows.items() if name == "cells"}
    assert count == {
        "all": len(counted(cells)),
        "bound": (~cells["causal"]).sum(),
        "idle": 1,
        "no logarithm": len(counted(cells)) - len(logged(cells)),
    }
    assert count["no logarithm"] >= 1


def test_cells_that_lack_a_level_are_none(cells: pd.DataFrame) -> None:
    frame = frame_of(cells)
    lacks = (frame["level"] == "propagated") & (frame["sequence_id"] == "s1#0")
    found = calibration_cells(frame[~lacks])
    assert set(found["sequence_id"]) == {"s0#0", "s2#0", "s3#0"}
    nothing = calibration(frame[frame["level"] != "local"], seed=SEED)
    assert nothing.law is None
    assert {len(column) for column in nothing.columns.values()} == {0}
    by_layer = frame.assign(layer=3)
    assert calibration_cells(pd.concat([frame, by_layer])).equals(calibration_cells(frame))


def test_the_full_cache_is_no_evidence(cells: pd.DataFrame) -> None:
    full = cells.iloc[:1].assign(policy="full", family="full", output_error=0.0)
    found = calibration_cells(frame_of(pd.concat([cells, full])))
    assert found.loc[found["policy"] == "full", "is_idle"].tolist() == [True]


def test_one_sequence_has_values_and_no_interval() -> None:
    found = rows_of(made_cells(1))
    assert found["spearman", "predicted", "all"]["value"] > 0.5
    for row in found.values():
        assert row["low"] is None
        assert row["high"] is None
    assert found["left_out_factor", "predicted", "corrected"]["value"] is None


def test_cells_that_do_not_differ_have_no_correlation_and_no_law() -> None:
    cells = made_cells().assign(kl_predicted_nats=0.5, kl_nats=0.7)
    found = rows_of(cells)
    for statistic in ("spearman", "log_pearson", "power_law_b", "pairs_ordered"):
        assert found[statistic, "predicted", "all"]["value"] is None
    times = found["propagated_over_predicted", "predicted", "all"]
    assert (times["value"], times["low"]) == pytest.approx((1.4, 1.4))


def test_nothing_but_bounds_leaves_counts_alone() -> None:
    found = rows_of(made_cells().assign(causal=False))
    assert found["cells", None, "all"]["value"] == 0
    assert found["spearman", "predicted", "all"]["value"] is None


def test_the_same_seed_gives_the_same_rows(cells: pd.DataFrame) -> None:
    shuffled = cells.sample(frac=1, random_state=3)
    assert rows_of(shuffled) == rows_of(cells)


def sequences_of(domains: str, unprobed: tuple[int, ...] = ()) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "sequence_id": [f"{domain}-{i}#0" for i, domain in enumerate(domains)],
            "domain": list(domains),
            "probed_from": [None if i in unprobed else 3.0 for i in range(len(domains))],
        }
    )


@given(st.text("abc", max_size=12), st.integers(0, 14), st.integers(0, 5))
def test_sequences_are_spread_over_domains_as_evenly_as_can_be(
    domains: str, count: int, seed: int
) -> None:
    sequences = sequences_of(domains)
    chosen = choose_calibrated(sequences, count, seed)
    assert len(set(chosen)) == len(chosen) == min(count, len(domains))
    assert list(chosen) == [one for one in sequences["sequence_id"] if one in chosen]
    taken = {domain: sum(one[0] == domain for one in chosen) for domain in set(domains)}
    for domain, number in taken.items():
        if number < domains.count(domain):  # it has some left: no other has two more
            assert max(taken.values()) <= number + 1
    assert choose_calibrated(sequences, count, seed) == chosen


def test_sequences_without_probes_are_not_chosen() -> None:
    chosen = choose_calibrated(sequences_of("aabb", unprobed=(0, 3)), 4, SEED)
    assert chosen == ("a-1#0", "b-2#0")


@pytest.fixture(scope="module")
def probed_folder(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path
) -> Path:
    out = tmp_path_factory.mktemp("probed") / "trace"
    options = RecordOptions(
        max_new_tokens=12, capture="influence", probes=ProbeOptions(number=2, dtype="float32")
    )
    record(str(model_folder), str(prompt_file), out, options)
    return out


POLICIES = ["knorm", "streaming", "int4", "full", "oracle:kept=0.5"]


class Heard(Silent):
    """What was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def calibrated_folder(tmp_path_factory: pytest.TempPathFactory, probed_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "results"
    heard = Heard()
    plan = make_plan(POLICIES, levels="predicted", calibrate=3)
    assert not simulate(probed_folder, out, plan, progress=heard).failed
    assert not [text for text in heard.said if text.startswith("calibrating")]
    return out


def test_some_sequences_are_run_at_all_levels_and_the_others_at_the_one_asked_for(
    calibrated_folder: Path,
) -> None:
    run = json.loads((calibrated_folder / "run.json").read_text())
    calibrated = set(run["calibrated"])
    assert len(calibrated) == run["plan"]["calibrate"] == 3
    assert run["plan"]["levels"] == ["predicted"]
    domains = {one["sequence_id"]: one["domain"] for one in run["sequences"]}
    assert {domains[name] for name in calibrated} == set(domains.values())
    kv = pq.read_table(calibrated_folder / "kv.parquet").to_pandas()
    for name, part in kv.groupby("sequence_id", observed=True):
        levels = {"local", "predicted", "propagated"} if name in calibrated else {"predicted"}
        assert set(part["level"]) == levels


def test_predictions_of_the_whole_are_corrected_and_nothing_else(calibrated_folder: Path) -> None:
    kv = pq.read_table(calibrated_folder / "kv.parquet").to_pandas()
    rows = pq.read_table(calibrated_folder / "calibration.parquet").to_pandas()
    value = rows[rows["level"] == "predicted"].set_index(["statistic", "group"])["value"]
    law = PowerLaw(value["power_law_a", "all"], value["power_law_b", "all"])
    whole = (kv["layer"] == schema.ALL) & (kv["kv_head"] == schema.ALL) & (kv["steps"] == "all")
    is_told = whole & (kv["level"] == "predicted")
    assert kv["kl_corrected_nats"].notna().equals(is_told)
    told = kv[is_told]
    np.testing.assert_allclose(
        told["kl_corrected_nats"], law.corrected(told["kl_predicted_nats"]), rtol=1e-5
    )
    summary = pq.read_table(calibrated_folder / "summary.parquet").to_pandas()
    of = summary[(summary["measure"] == "kl_corrected_nats") & (summary["domain"] == "all")]
    assert set(of["level"]) == {"predicted"}
    assert of["n"].max() == 5


def test_finished_cells_are_found_and_all_levels_calibrate_without_being_asked(
    calibrated_folder: Path, probed_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(calibrated_folder, tmp_path / "copy")
    heard = Heard()
    plan = make_plan(POLICIES, levels="predicted", calibrate=9)
    done = simulate(probed_folder, folder, plan, progress=heard)
    num_families = len(POLICIES)
    assert done.num_found == num_families * (5 + 2 * 3)
    assert done.num_computed == num_families * 2 * 2
    assert [text for text in heard.said if "calibrating on 5 sequences" in text]
    before = pq.read_table(folder / "calibration.parquet")
    done = simulate(probed_folder, folder, make_plan(POLICIES, levels=LEVELS))
    assert done.num_computed == 0
    assert pq.read_table(folder / "calibration.parquet").equals(before)
    simulate(probed_folder, folder, make_plan(POLICIES, levels="predicted"))
    assert not (folder / "calibration.parquet").exists()


def test_a_calibration_that_cannot_be_is_refused(trace_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on 0 sequences"):
        make_plan(["h2o"], calibrate=0)
    with pytest.raises(UsageError, match="--kv"):
        make_plan(vocab=["oracle"], calibrate=2)
    with pytest.raises(TraceError, match="needs influence probes"):
        simulate(trace_folder, tmp_path / "r", make_plan(["h2o"], calibrate=2))
