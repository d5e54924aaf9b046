"""What is left of the needles: the section, its map and its tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps

from tests.report.fake import make_results, write_table
from tracekit.measure.stats import bootstrap_mean
from tracekit.report.blocks import Absent, Section
from tracekit.report.figures.figure import Drawing
from tracekit.report.figures.needle_map import (
    DEPTHS,
    _ink,
    depth_bin,
    length_bin,
    length_name,
    needle_map,
)
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections.needles.page import _needles, section
from tracekit.report.tables import HtmlTable
from tracekit.schema import ALL, ANY, KV_RESULTS, LOGIT_STATS

if TYPE_CHECKING:
    from pathlib import Path

HELD = {"knorm": 0.1, "snapkv": 0.8, "random": 0.3, "oracle": 0.9}


def sequence(number: int, **places: Any) -> dict[str, Any]:
    end = 128 << (number % 3)
    return {
        "sequence_id": f"needle-{number:02d}#0",
        "prompt_id": f"needle-{number:02d}",
        "domain": "retrieval",
        "num_tokens": end + 64,
        "context_end": end if number % 2 else None,
        "prompt_end": end,
        "num_scored": 64,
        "finish_reason": "length",
        "text_source": "generated",
        "mean_entropy_nats": 1.0,
        "prompt_sha256": f"prompt of needle-{number:02d}",
        "tokens_sha256": f"tokens of needle-{number:02d}",
        "needle_position": 10,
        "needle_depth_frac": (number % 10) / 10,
    } | places


def kv_rows(sequences: list[dict[str, Any]], families: dict[str, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "sequence_id": one["sequence_id"],
            "domain": one["domain"],
            "policy": f"{family}:kept={kept:g}",
            "family": family,
            "level": "local",
            "causal": family != "oracle",
            "selects": False,
            "evict_at": "at=prompt",
            "query_aware": True,
            "layer": ALL,
            "kv_head": ALL,
            "steps": ANY,
            "bucket": "< 256",
            "target_frac": kept,
            "kept_frac": kept + 0.01,
            "num_evicted": 9,
            "needle_kept": max(0.0, min(1.0, held + number / 50 + (kept - 0.25))),
            "is_idle": False,
            "is_clipped": family == "snapkv" and number == 0,
            "is_clamped": False,
        }
        for number, one in enumerate(sequences)
        for family, held in families.items()
        for kept in (0.1, 0.25, 0.5)
    )


def results(
    folder: Path,
    num: int,
    families: dict[str, float] | None = None,
    change: Any = None,
    **places: Any,
) -> Results:
    sequences = [sequence(number, **places) for number in range(num)]
    make_results(folder / "r", num_sequences=1, run={"sequences": sequences})
    frame = kv_rows(sequences, families or HELD)
    write_table(folder / "r", KV_RESULTS, frame if change is None else change(frame))
    return load_results(folder / "r")


def parts(found: Section | Absent, kind: type[Any]) -> list[Any]:
    assert isinstance(found, Section)
    return [part for part in found.parts() if isinstance(part, kind)]


def texts(table: HtmlTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def said(found: Section | Absent) -> str:
    assert isinstance(found, Section)
    return " ".join(getattr(part, "text", "") for part in found.blocks)


def test_without_needles_the_command_that_records_some_is_told(tmp_path: Path) -> None:
    found = section(load_results(make_results(tmp_path / "r", num_sequences=1)), Options())
    assert isinstance(found, Absent)
    assert "--prompts core" in found.command


def test_policies_that_evict_nothing_put_no_needle_at_risk(tmp_path: Path) -> None:
    found = section(results(tmp_path, 3, change=lambda f: f.assign(num_evicted=0)), Options())
    assert isinstance(found, Absent)
    assert "--kept 0.25" in found.command


def test_a_policy_stands_at_the_kept_fraction_nearest_a_quarter(tmp_path: Path) -> None:
    table = parts(section(results(tmp_path, 4), Options()), HtmlTable)[0]
    rows = texts(table)
    assert [row[0] for row in rows] == ["snapkv", "random", "knorm", "oracle (bound)"]
    assert {row[1] for row in rows} == {"26\u00a0%"}
    assert {row[2] for row in rows} == {"74\u00a0%"}
    expected = bootstrap_mean([np.float32(0.8 + n / 50) for n in range(4)], seed=0)
    assert expected.low is not None
    assert expected.high is not None
    assert rows[0][3] == "83\u00a0%"
    assert rows[0][4] == f"{100 * expected.low:.0f}\u00a0to\u00a0{100 * expected.high:.0f}\u00a0%"
    assert rows[0][5:] == ["80\u00a0%", "4", "0", "1"]


def test_the_answer_names_the_best_and_the_worst_method_and_no_bound(tmp_path: Path) -> None:
    text = said(section(results(tmp_path, 4), Options()))
    assert "snapkv holds 83\u00a0%" in text
    assert "the most of 3 policies; knorm the least: 13\u00a0%" in text
    assert "random, which does not look, holds 33\u00a0%" in text
    assert "oracle" not in text


def test_bounds_alone_answer_nothing(tmp_path: Path) -> None:
    text = said(section(results(tmp_path, 4, {"oracle": 0.9}), Options()))
    assert text.startswith("Only bounds were tried")


def test_idle_cells_are_counted_and_not_averaged(tmp_path: Path) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        idle = (frame["sequence_id"] == "needle-00#0") & (frame["family"] == "knorm")
        idle |= frame["family"] == "random"
        return frame.assign(
            num_evicted=np.where(idle, 0, 9),
            needle_kept=np.where(idle, 1.0, frame["needle_kept"]),
        )

    table = parts(section(results(tmp_path, 4, change=change), Options()), HtmlTable)[0]
    rows = {row[0]: row for row in texts(table)}
    assert rows["knorm"][3] == "14\u00a0%"
    assert rows["knorm"][6:8] == ["3", "1"]
    assert "random" not in rows
    assert table.caption.endswith("evict nothing on any of the texts: random")


def test_few_needles_are_listed_one_by_one(tmp_path: Path) -> None:
    found = section(results(tmp_path, 4), Options())
    assert not parts(found, Drawing)
    rows = texts(parts(found, HtmlTable)[1])
    assert len(rows) == 3 * 4
    assert rows[1] == [
        *("snapkv", "needle-01#0", "10\u00a0%", "256", "26\u00a0%", "82\u00a0%", "none")
    ]
    assert rows[0][-1] == "clipped"


def test_many_needles_are_a_map_of_means(tmp_path: Path) -> None:
    folder = results(tmp_path, 30)
    (figure,) = parts(section(folder, Options()), Drawing)
    table = figure.table
    assert set(table["family"]) == {"snapkv", "random", "knorm"}
    assert table["n"].sum() == 3 * 30
    for row in table.to_dict("records"):
        values = []
        for number in range(30):
            depth = DEPTHS[math.floor((number % 10) / 10 * 5)]
            low = 128 << (number % 3)
            name = f"{low}-{2 * low - 1}".replace("1023", "1\u202f023")
            if (depth, name) == (row["depth"], row["length_tokens"]):
                values.append(min(1.0, HELD[row["family"]] + number / 50))
        expected = bootstrap_mean(values, seed=0)
        assert row["needle_kept"] == pytest.approx(expected.mean, abs=1e-6)
        assert row["n"] == len(values)
    least = table["needle_kept"].min()
    assert f"Lowest: {100 * least:.0f}\u00a0% (knorm" in figure.caption
    assert f"least {100 * least:.0f}\u00a0% (knorm" in figure.alt
    for value in table["needle_kept"]:
        assert f">{100 * value:.0f}<" in figure.svg


def test_at_most_six_policies_have_a_panel(tmp_path: Path) -> None:
    families = {f"p{number}": number / 10 for number in range(8)}
    found = section(results(tmp_path, 9, families), Options())
    (figure,) = parts(found, Drawing)
    assert set(figure.table["family"]) == {f"p{number}" for number in range(2, 8)}
    assert "the 6 of 8 policies that hold most" in said(found)
    assert len(parts(found, HtmlTable)[0].rows) == 8


def test_results_that_do_not_tell_the_depth_are_read(tmp_path: Path) -> None:
    few = results(tmp_path, 4)
    for one in few.run["sequences"]:
        del one["needle_depth_frac"], one["needle_position"]
    found = section(few, Options())
    assert "do not tell how deep" in said(found)
    assert {row[2] for row in texts(parts(found, HtmlTable)[1])} == {"n/a"}


def test_many_needles_of_unknown_depth_have_no_map(tmp_path: Path) -> None:
    found = section(results(tmp_path, 9, needle_depth_frac=None), Options())
    assert not parts(found, Drawing)
    assert "map" in parts(found, Absent)[0].what


def test_depths_without_a_needle_are_named(tmp_path: Path) -> None:
    text = said(section(results(tmp_path, 4, needle_depth_frac=0.15), Options()))
    assert "nothing said, at depths of 20-40\u00a0%, 40-60\u00a0%, 60-80\u00a0%" in text
    deep = [sequence(number)["needle_depth_frac"] for number in range(10)]
    assert {depth_bin(one) for one in deep} == set(range(5))


@given(st.floats(0, 1), st.integers(1, 1 << 20))
def test_bins_hold_what_their_names_say(depth: float, length: int) -> None:
    low, high = map(int, DEPTHS[depth_bin(depth)].removesuffix("\u00a0%").split("-"))
    assert low / 100 <= depth + 1e-12
    assert depth < high / 100 + 1e-12 or depth == 1
    shortest, longest = length_name(length_bin(length)).replace("\u202f", "").split("-")
    assert int(shortest) <= length <= int(longest)


@given(st.floats(0, 1))
def test_numbers_in_cells_have_a_contrast_of_4_5(value: float) -> None:
    color = colormaps["cividis"](value)
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    ink = {"#ffffff": 1.0, "#000000": 0.0}[_ink(color)]
    high, low = max(luminance, ink), min(luminance, ink)
    assert (high + 0.05) / (low + 0.05) >= 4.5


def test_the_map_is_the_same_bytes_for_the_same_needles(tmp_path: Path) -> None:
    folder = results(tmp_path, 9)
    whole = folder.whole
    rows = whole[whole["needle_kept"].notna()].to_dict("records")
    needles = _needles(folder, rows)
    one, other = needle_map(needles, 0), needle_map(needles, 0)
    assert (one.content, one.csv, one.caption) == (other.content, other.csv, other.caption)


def loss(folder: Results, groups: tuple[str, ...]) -> None:
    """Add the statistics of steps in the needle and elsewhere."""
    frame = pd.DataFrame(
        {
            "policy": f"{family}:kept={kept:g}",
            "family": family,
            "kept_frac": kept,
            "convention": "tracekit",
            "grouping": "needle",
            "group": group,
            "statistic": statistic,
            "unit": "nats",
            "value": value * (4 if group == "in the needle" else 1),
            "low": 0.5,
            "high": 2.0,
            "n": 4,
            "num_steps": 12,
        }
        for family, value in (("snapkv", 0.25), ("knorm", 0.125))
        for kept in (0.1, 0.3)
        for group in groups
        for statistic in ("kl_mean", "kl_max")
    )
    write_table(folder.folder, LOGIT_STATS, frame)


def test_loss_on_needle_tokens_stands_beside_that_elsewhere(tmp_path: Path) -> None:
    folder = results(tmp_path, 4)
    loss(folder, ("in the needle", "elsewhere"))
    rows = texts(parts(section(folder, Options()), HtmlTable)[2])
    rest = ["0.5 to\u00a02", "4", "12"]
    assert rows == [
        ["knorm", "30\u00a0%", "0.5", *rest, "0.125", *rest],
        ["snapkv", "30\u00a0%", "1", *rest, "0.25", *rest],
    ]


def test_a_needle_without_other_steps_has_nothing_beside_it(tmp_path: Path) -> None:
    folder = results(tmp_path, 4)
    loss(folder, ("in the needle",))
    rows = texts(parts(section(folder, Options()), HtmlTable)[2])
    assert rows[0][6:] == ["n/a"] * 4


def test_where_nothing_was_run_inside_the_model_the_command_is_told(tmp_path: Path) -> None:
    (absent,) = parts(section(results(tmp_path, 4), Options()), Absent)
    assert absent.command.endswith("--level propagated")


def test_runs_without_a_step_of_the_needle_say_so(tmp_path: Path) -> None:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([frame, frame.assign(level="propagated")], ignore_index=True)

    found = section(results(tmp_path, 4, change=change), Options())
    assert not parts(found, Absent)
    assert "No step that was run inside the model" in said(found)
