from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.report.fake import make_results, write_table
from tracekit.report.blocks import Absent, Section, Text
from tracekit.report.figures.figure import Drawing, Figure
from tracekit.report.figures.memory import REQUESTS, memory_by_requests, memory_by_tokens
from tracekit.report.load import Results, load_results
from tracekit.report.memory.held import measured_bytes, memory_of
from tracekit.report.options import Options
from tracekit.report.sections.memory import section
from tracekit.report.tables import HtmlTable
from tracekit.schema import KV_RESULTS, SUMMARY

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.report.memory.held import Memory

TOKEN_BYTES = 2 * 2 * 30 * 3 * 64
QUEST = {"read_frac": 0.2, "read_bytes": 3e5, "fetched_bytes": 1e5, "hit_frac": 0.75}
BUDGET = "streaming:kept=512tok"


def make(folder: Path) -> Path:
    """Write fake results with peaks, a policy of a token budget, a recall policy and two buckets."""
    made = make_results(folder, num_sequences=6)
    kv: pd.DataFrame = pq.read_table(made / "kv.parquet").to_pandas()
    kv["peak_kv_bytes"], kv["is_clamped"] = 1.1 * kv["kv_bytes"], kv["target_frac"] == 0.5
    kv["policy"] = kv["policy"].astype(str).replace("streaming:kept=0.25", BUDGET)
    write_table(made, KV_RESULTS, plain(kv))
    summary: pd.DataFrame = pq.read_table(made / "summary.parquet").to_pandas()
    summary["name"] = summary["name"].astype(str).replace("streaming:kept=0.25", BUDGET)
    held = summary[summary["measure"] == "kept_frac"]
    parts = [summary, held.assign(measure="peak_frac", mean=0.9)]
    everywhere = summary[
        summary["measure"].isin(["kv_bytes", "full_kv_bytes"]) & (summary["domain"] == "all")
    ]
    for bucket, factor in (("< 256", 1.0), ("256 - 1k", 4.0)):
        grown = everywhere.assign(bucket=bucket)
        for name in ("mean", "low", "high"):
            grown[name] *= factor
        parts.append(grown)
    one = held[(held["family"] == "h2o") & (held["domain"] == "all")].head(1)
    for measure, value in QUEST.items():
        parts.append(
            one.assign(
                family="quest", name="quest", x_name="read_frac", measure=measure, x=0.2, mean=value
            )
        )
    write_table(made, SUMMARY, plain(pd.concat(parts, ignore_index=True)))
    return made


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame whose categories are texts."""
    texts = frame.select_dtypes("category").columns
    return frame.astype(dict.fromkeys(texts, str))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(make(tmp_path_factory.mktemp("memory") / "r"))


@pytest.fixture(scope="module")
def memory(results: Results) -> Memory:
    return memory_of(results)


def made(results: Results, memory_bytes: float | None = None) -> Section:
    found = section(results, Options(memory_bytes=memory_bytes))
    assert isinstance(found, Section)
    return found


def table_of(found: Section, name: str) -> list[dict[str, str]]:
    block = next(one for one in found.parts() if isinstance(one, HtmlTable) and one.name == name)
    labels = [column.label for column in block.columns]
    return [dict(zip(labels, [cell.text for cell in row], strict=True)) for row in block.rows]


def test_the_full_cache_is_the_closed_form(results: Results, memory: Memory) -> None:
    table = memory_by_tokens(results, memory).table
    full = table[table["policy"] == "full cache"].set_index("tokens")["kv_bytes"]
    assert full[8192] == TOKEN_BYTES * 8192
    requests = memory_by_requests(results, memory, None).table
    most = requests[(requests["requests"] == 64) & (requests["policy"] == "full cache")]
    assert most["kv_bytes"].iloc[0] == 64 * full[8192]


def test_a_policy_that_evicts_again_and_again_is_its_measured_fraction_of_it(
    results: Results, memory: Memory
) -> None:
    kept = {p.name: p for p in results.curves("kv", "kept_frac")["h2o"]}["h2o:kept=0.25"]
    table = memory_by_tokens(results, memory).table
    line = table[(table["policy"].str.startswith("h2o")) & (table["source"] != "measured")]
    at_end = line[line["tokens"] == 8192]["kv_bytes"].iloc[0]
    assert at_end == pytest.approx(kept.mean * TOKEN_BYTES * 8192)


def test_a_token_budget_is_a_flat_line_from_its_tokens_on(results: Results, memory: Memory) -> None:
    table = memory_by_tokens(results, memory).table
    line = table[(table["policy"] == "streaming") & (table["source"] != "measured")]
    by_tokens = line.set_index("tokens")["kv_bytes"]
    assert by_tokens[256] == 256 * TOKEN_BYTES
    assert set(by_tokens[by_tokens.index >= 512]) == {512 * TOKEN_BYTES}


def test_a_policy_that_acts_once_has_measured_points_and_no_line(
    results: Results, memory: Memory
) -> None:
    once = {name for one in memory.groups if not one.repeats for name in one.families}
    assert once == {"knorm", "random", "snapkv"}
    figure = memory_by_tokens(results, memory)
    label = next(one.name for one in memory.groups if "snapkv" in one.families)
    points = figure.table[figure.table["policy"] == label]
    assert set(points["source"]) == {"measured"}
    assert len(points) == 6
    assert "that act once keep all later tokens" in figure.caption
    assert "carried on, not measured" in figure.caption


def test_measured_points_are_the_rows_of_the_results_by_a_plain_loop(results: Results) -> None:
    lengths = {one["sequence_id"]: one["num_tokens"] for one in results.run["sequences"]}
    slow = [
        (lengths[row.sequence_id] - 1, row.peak_kv_bytes)
        for row in results.whole.itertuples()
        if row.policy == "h2o:kept=0.5" and not row.is_idle
    ]
    found = measured_bytes(results, "local", ["h2o:kept=0.5"])
    assert sorted(slow) == list(zip(found["tokens"], found["kv_bytes"], strict=True))


def test_policies_that_hold_the_same_share_a_line_and_are_all_named(
    results: Results, memory: Memory
) -> None:
    together = next(one for one in memory.groups if len(one.points) > 1)
    assert together.name == f"{together.families[0]} and {len(together.points) - 1} more"
    assert ", ".join(together.families) in memory_by_tokens(results, memory).caption


def test_bounds_are_never_drawn(results: Results) -> None:
    bounds = results.summary.assign(causal=results.summary["family"] != "snapkv")
    only = dataclasses.replace(results, _frames={**results._frames})
    only.__dict__["summary"] = bounds
    assert all("snapkv" not in one.families for one in memory_of(only).groups)
    rows = table_of(made(only), "table-accounts")
    assert {row["policy"] for row in rows if "snapkv" in row["policy"]} == {"snapkv (bound)"}


def test_requests_are_drawn_against_the_device(results: Results, memory: Memory) -> None:
    room = 4.0 * 2**30
    figure = memory_by_requests(results, memory, room)
    assert "room 4\u00a0GiB" in figure.svg
    assert "room" not in memory_by_requests(results, memory, None).svg
    assert "room" not in memory_by_requests(results, memory, -1.0).svg
    assert sorted(set(figure.table["requests"])) == list(REQUESTS)


def test_what_fits_is_counted_on_a_device_only(results: Results) -> None:
    rows = table_of(made(results, 4.0 * 2**30), "table-fits")
    assert rows[0]["policy"] == "full cache"
    assert int(rows[0]["requests that fit"]) == 4 * 2**30 // (TOKEN_BYTES * 8192)
    assert "requests that fit" not in table_of(made(results), "table-fits")[0]
    texts = [one.text for one in made(results).parts() if isinstance(one, Text)]
    assert any("--memory 80GiB" in text for text in texts)


def test_a_device_smaller_than_the_weights_has_room_for_nothing(results: Results) -> None:
    heavy = dataclasses.replace(
        results, spec=dataclasses.replace(results.spec, num_weight_bytes=10**12)
    )
    found = made(heavy, 1e11)
    assert {row["requests that fit"] for row in table_of(found, "table-fits")} == {"0"}
    texts = [one.text for one in found.parts() if isinstance(one, Text)]
    assert any("nothing is left for caches" in text for text in texts)


def test_eight_requests_are_shown_by_length_bucket(results: Results) -> None:
    rows = [
        row
        for row in table_of(made(results), "table-memory-buckets")
        if row["policy"].startswith("h2o")
    ]
    assert [row["tokens"] for row in rows] == ["< 256", "256 - 1k"]
    assert {row["n"] for row in rows} == {"6"}


def test_each_policy_is_accounted_for_at_three_fractions(results: Results) -> None:
    rows = [row for row in table_of(made(results), "table-accounts") if row["policy"] == "h2o"]
    assert [row["asked"] for row in rows] == ["10\u00a0%", "25\u00a0%", "50\u00a0%"]
    assert [row["flagged"] for row in rows] == ["0", "0", "6"]
    assert {row["peak"] for row in rows} == {"90\u00a0%"}
    assert {row["padded"] for row in rows} == {"n/a"}


def test_recall_policies_have_a_table_of_their_own(results: Results) -> None:
    (row,) = table_of(made(results), "table-recall")
    assert row["policy"] == "quest"
    assert row["hits of the fast tier"] == "75\u00a0%"
    assert row["transfer a step (s)"] == "n/a"


def test_every_figure_has_caption_alt_and_table(results: Results) -> None:
    figures = [one for one in made(results, 1e12).parts() if isinstance(one, Figure)]
    assert [one.name for one in figures] == ["memory-by-tokens", "memory-by-requests"]
    for figure in figures:
        assert isinstance(figure, Drawing)
        assert figure.svg.endswith("</svg>")
        assert figure.alt[0].isupper()
        assert "level local" in figure.caption
        assert len(figure.table)


def test_the_same_results_give_the_same_bytes(results: Results) -> None:
    again = load_results(results.folder)
    assert [one.svg for one in made(results).parts() if isinstance(one, Drawing)] == [
        one.svg for one in made(again).parts() if isinstance(one, Drawing)
    ]


def test_results_without_peaks_draw_lines_and_no_points(tmp_path: Path) -> None:
    bare = load_results(make_results(tmp_path / "r", num_sequences=4))
    table = memory_by_tokens(bare, memory_of(bare)).table
    assert "measured" not in set(table["source"])


def test_without_a_kv_policy_the_section_says_what_to_run(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=3, questions=("vocab",)))
    absent = section(results, Options())
    assert isinstance(absent, Absent)
    assert absent.command.startswith("tracekit simulate TRACE -o RESULTS --kv")


def test_layers_that_are_not_counted_are_named(results: Results) -> None:
    layers = list(results.spec.layers)
    layers[3] = dataclasses.replace(layers[3], kind="linear", num_heads=0, num_kv_heads=0)
    layers[4] = dataclasses.replace(layers[4], refusal="its cache holds compressed keys")
    other = dataclasses.replace(
        results, spec=dataclasses.replace(results.spec, layers=tuple(layers))
    )
    texts = " ".join(one.text for one in made(other).parts() if isinstance(one, Text))
    assert "states of linear layers, 1 of 30 layers" in texts
    assert "1 of 30 layers cannot be replayed" in texts
