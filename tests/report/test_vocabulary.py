from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.fake import ESTIMATORS, HOSTILE, SIZES, make_results, write_table
from tracekit.report import write_report
from tracekit.report.blocks import Absent, Section
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections.vocabulary.attended import drift, foretelling
from tracekit.report.sections.vocabulary.controllers import controllers
from tracekit.report.sections.vocabulary.cost import batches, findings
from tracekit.report.sections.vocabulary.misses import MOST_SHOWN, misses
from tracekit.report.sections.vocabulary.named import MOST_METHODS, named
from tracekit.report.sections.vocabulary.page import section
from tracekit.report.sections.vocabulary.verdicts import few, sentences, verdicts
from tracekit.report.tables import HtmlTable
from tracekit.report.verdict.schemes import with_family
from tracekit.schema import (
    ALL,
    ANY,
    ATTENDED_SUMMARY,
    BATCH_UNIONS,
    CANDIDATE_STATS,
    CANDIDATES,
    HEAD_TIMES,
    MISS_CLASSES,
    MISSES,
    SUMMARY,
    VERDICTS,
    VOCAB_RESULTS,
    Table,
)

if TYPE_CHECKING:
    from pathlib import Path

SIZE = SIZES[len(SIZES) // 2]
Rows = list[dict[str, Any]]


def _schemes(**more: Any) -> Rows:
    base = {"controller": "fixed", "fit": "asked", "size": SIZE}
    return [base | {"estimator": name} | more for name in ESTIMATORS]


def make_tables(hostile: tuple[str, ...] = ()) -> dict[Table, pd.DataFrame]:
    """Return candidate sets of 30 steps of 4 sequences, and what is made of them."""
    rng = np.random.default_rng(0)
    texts = [*hostile, *(f"token{number}" for number in range(30))][:30]
    candidates = [
        one | {"sequence_id": f"s{step % 4}", "position": step, "neg_log_mass_nats": loss}
        for one in _schemes()
        for step, loss in enumerate(rng.gamma(0.2, 1.0, 30))
    ]
    stats = [
        one | {"statistic": f"neg_log_mass_{name}", "value": value, "low": 0.1, "high": 0.3}
        for one in _schemes(grouping=ANY, group=ANY, unit="nats", n=4, num_steps=30)
        for name, value in (("mean", 0.2), ("max", math.inf), ("p99", 2.0), ("median", 0.01))
    ]
    missed = [
        one | {"place": place, "text": text, "context": text, "best_prob": 1 - place / 40}
        for one in _schemes(
            num_misses=30,
            sequence_id="s1",
            domain="story",
            position=7,
            best_id=1,
            token_id=1,
            entropy_nats=0.1,
            **{"class": "word"},
        )
        for place, text in enumerate(texts, 1)
    ]
    classes = [
        one | {"class": name, "num_misses": num, "num_steps": 50, "miss_share": num / 12}
        for one in _schemes(step_share=0.5)
        for name, num in (("word", 2), ("cjk", 10), ("byte", 0))
    ]
    unions = [
        one | {"batch": batch, "cost_frac": 0.1 * batch}
        for one in _schemes(num_draws=32, n=4)
        for batch in (1, 8)
    ]
    return {
        CANDIDATES: pd.DataFrame(candidates),
        CANDIDATE_STATS: pd.DataFrame(stats),
        MISSES: pd.DataFrame(missed),
        MISS_CLASSES: pd.DataFrame(classes).assign(lift=lambda f: 2 * f["miss_share"]),
        BATCH_UNIONS: pd.DataFrame(unions),
        VERDICTS: make_verdicts(),
        HEAD_TIMES: make_times(),
        ATTENDED_SUMMARY: make_attended(),
    }


def make_times(share: float | None = 0.2) -> pd.DataFrame:
    common = {"rounds": 7, "threads": 2, "dtype": "float32", "head_share": share}
    spent = {"gather_s": 2e-4, "multiply_s": 1e-4, "full_s": 1e-3, "ceiling_free": 1.25}
    spread = {"spread_s": 1e-5, "full_spread_s": 1e-5, "contiguous_s": 1e-4}
    rows = [{"batch": b, "size": SIZE, "gathered_rows": b * SIZE} for b in (1, 8)]
    return pd.DataFrame([row | common | spent | spread for row in rows])


def make_verdicts() -> pd.DataFrame:
    common = {"controller": "fixed", "fit": "asked", "size": 4096, "steps_needed": 300}
    judged = common | {"estimator": "lowrank", "cost_frac": 0.25, "n": 8, "n_choosing": 8}
    judged |= {"hit_argmax": 0.998, "low": 0.992, "high": 0.999, "num_steps": 500}
    too_few = {"domain": "code", "verdict": "too few prompts", "n": 1, "n_choosing": 2}
    rows = [
        judged | {"domain": ANY, "hit_level": 0.99, "verdict": "kept", "why": "kept: so"},
        judged
        | {"domain": ANY, "hit_level": 0.999, "verdict": "not suitable", "why": "not suitable: no"},
        too_few | {"hit_level": 0.99, "why": "too few prompts: 2 choose and 1 judge"},
    ]
    return pd.DataFrame(rows)


def make_attended(*, is_apart: bool = True) -> pd.DataFrame:
    near = {"low": 0.05, "high": 0.08, "n": 5, "level": "local", "domain": ANY}
    chance = {"mean": 0.06, "low": 0.02, "high": 0.03 if is_apart else 0.07}
    rows = [
        near | {"layer": layer, "head": head, "measure": measure, "mean": mean}
        for layer, head, mean in ((ALL, ALL, 0.06), (0, 0, 0.1), (0, 1, 0.4), (1, 0, 0.2))
        for measure in ("top_1_hit_all", "top_8_hit_all", "next_mass", "copied_frac")
    ]
    rows.append(near | chance | {"layer": ALL, "head": ALL, "measure": "chance_mass"})
    for first, level in ((1, 0.3), (65, 0.4), (129, 0.5)):
        span = {"context_first": first, "context_last": 2 * first + 62}
        for measure in ("drift_1", "drift_16", "age_tokens", "prompt_frac"):
            mean = level if measure == "drift_1" else 0.4
            ends = {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}
            rows.append(near | span | ends | {"layer": ALL, "head": ALL, "measure": measure})
    return pd.DataFrame(rows).reindex(columns=[one.name for one in ATTENDED_SUMMARY.columns])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_results(tmp_path_factory.mktemp("v") / "r", num_sequences=8)
    for table, frame in make_tables(HOSTILE).items():
        write_table(folder, table, frame)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results(folder)


def _with(results: Results, tables: dict[Table, pd.DataFrame]) -> Results:
    frames = {table.name: frame for table, frame in tables.items()}
    return replace(results, _frames={SUMMARY.name: results.summary} | frames)


def test_the_section_has_every_part_once_and_no_id_twice(results: Results) -> None:
    made = section(results, Options())
    assert isinstance(made, Section)
    names = [block.name for block in made.parts() if block.kind in ("table", "figure")]
    assert [name for name, num in Counter(names).items() if num > 1] == []
    expected = {
        *("coverage-cost", "coverage-hit-argmax", "coverage-mass", "mass-tails"),
        *("table-estimators", "table-mass-tails", "table-verdicts", "table-vocabulary-domains"),
        *("table-miss-classes", "table-misses-1", "table-misses-2", "table-batches"),
        *("table-foretelling", "table-drift"),
    }
    assert set(names) == expected


def test_the_page_is_the_same_twice_and_hostile_tokens_are_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracekit.report.sections.ORDER", (section,))
    pages = [write_report(folder, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0].replace(b"a-files", b"b-files") == pages[1]
    page = pages[0].decode("utf-8")
    listed = page[page.index('id="table-misses-1"') : page.index('id="table-misses-2"')]
    assert "&lt;script&gt;alert(1)" in listed
    assert "<script" not in listed
    assert "\u202e" not in listed


def test_means_by_estimator_are_enough_for_a_section(results: Results) -> None:
    poor = _with(results, {table: results.table(table).head(0) for table in make_tables()})
    made = section(poor, Options())
    assert isinstance(made, Section)
    names = {block.name for block in made.parts() if block.kind in ("table", "figure")}
    assert {"coverage-cost", "table-estimators", "table-vocabulary-domains"} <= names
    assert not names & {"mass-tails", "table-verdicts", "table-batches"}
    absent = made.blocks[-1]
    assert isinstance(absent, Absent)
    assert "--attention" in absent.command


def test_attention_is_told_without_candidate_sets_and_nothing_without_both(
    results: Results,
) -> None:
    kv = results.summary[results.summary["question"] == "kv"]
    alone = _with(results, {SUMMARY: kv, ATTENDED_SUMMARY: make_attended()})
    made = section(alone, Options())
    assert isinstance(made, Section)
    assert [block.kind for block in made.blocks][:2] == ["absent", "heading"]
    nothing = _with(results, {SUMMARY: kv, ATTENDED_SUMMARY: make_attended().head(0)})
    assert isinstance(section(nothing, Options()), Absent)


def test_verdicts_name_scheme_cost_evidence_and_ceiling(results: Results) -> None:
    kept, refused = sentences(results)
    # 1 / (1 - 0.2 * (1 - 0.25)) = 1.18
    for part in ("lowrank", "4\u202f096", "25\u00a0%", "1.18", "99.80", "500", "8 others"):
        assert part in kept
    assert refused == "99.9\u00a0% of most likely tokens: not suitable: no."
    table = verdicts(results)
    assert table is not None
    assert [row[2].text for row in table.rows] == ["kept", "not suitable"]
    assert "code 2 + 1" in few(results)


def test_at_most_twenty_misses_of_a_scheme_are_listed_and_all_counted(results: Results) -> None:
    blocks = misses(results, named(results))
    parts = [part for block in blocks for part in block.parts()]
    tables = [part for part in parts if isinstance(part, HtmlTable)]
    listed = [table for table in tables if table.name.startswith("table-misses")]
    assert [len(table.rows) for table in listed] == [MOST_SHOWN, MOST_SHOWN]
    assert all("20 most certain of 30" in table.caption for table in listed)
    # 10 of 12 misses, lift 20 / 12; a word's is 4 / 12.
    assert "cjk by" in blocks[0].text  # type: ignore[attr-defined]
    assert "word by" not in blocks[0].text  # type: ignore[attr-defined]


def test_findings_say_ceiling_and_batches(results: Results) -> None:
    told = dict(findings(results, named(results)))
    assert "20\u00a0% of the weight bytes" in told["Ceiling"]
    assert "10\u00a0%" in told["Batches"]
    assert "80\u00a0%" in told["Batches"]
    assert batches(results, named(results)) is not None


def test_an_unknown_share_of_the_head_has_no_ceiling(results: Results) -> None:
    unknown = _with(results, {HEAD_TIMES: make_times(None), VERDICTS: make_verdicts()})
    assert "Ceiling" not in dict(findings(unknown, named(unknown)))
    assert "as fast" not in next(sentences(unknown))


def test_what_reads_the_full_head_is_never_named_nor_is_a_bound(results: Results) -> None:
    chosen = named(results)
    assert chosen.methods == ("lowrank", "previous", "frequency")
    rows = results.summary
    dear = rows["family"].eq("lowrank") & rows["measure"].eq("cost_frac")
    bound = rows["family"].eq("previous") & rows["question"].eq("vocab")
    changed = rows.assign(mean=rows["mean"].mask(dear, 1.0), causal=rows["causal"] & ~bound)
    chosen = named(_with(results, {SUMMARY: changed}))
    assert (chosen.methods, chosen.dear, chosen.bounds) == (
        ("frequency",),
        ("lowrank",),
        ("previous",),
    )
    assert "lowrank (read as much as the full head or more)" in chosen.rule
    assert set(chosen.looks) == {"frequency", "oracle"}


def test_of_many_methods_the_front_and_the_best_are_named(results: Results) -> None:
    rows = results.summary
    one = rows[rows["family"].eq("lowrank") & rows["measure"].isin(["hit_argmax", "cost_frac"])]
    made = []
    for place in range(MOST_METHODS + 4):
        # All cost alike but the worst, which is on the front as the cheapest.
        mean = np.where(one["measure"] == "cost_frac", 0.5 if place else 0.1, 0.3 + place / 100)
        made.append(one.assign(family=f"m{place:02d}", name=f"m{place:02d}", mean=mean))
    chosen = named(_with(results, {SUMMARY: pd.concat(made)}))
    best = [f"m{place:02d}" for place in range(MOST_METHODS + 3, 4, -1)]
    assert chosen.methods == (*best, "m00")
    assert chosen.rest == ("m01", "m02", "m03", "m04")


def test_sizes_that_no_decoder_has_are_left_out(results: Results) -> None:
    rows = pd.DataFrame(
        [
            {"estimator": "lowrank", "controller": "fixed", "fit": "asked"},
            {"estimator": "lowrank", "controller": "fixed", "fit": "own"},
            {"estimator": "lowrank", "controller": "fixed@other", "fit": "asked"},
        ]
    )
    assert list(with_family(results, rows)["family"]) == ["lowrank"]


_HITS = st.lists(
    st.tuples(*(st.integers(0, 8) for _ in range(3)), st.integers(8, 9)), min_size=1, max_size=6
)


@settings(max_examples=20, deadline=None)
@given(_HITS)
def test_the_gain_of_a_controller_is_paired_by_sequence_over_all_steps_alike(
    hits: list[tuple[int, int, int, int]],
) -> None:
    rows = [
        {
            "sequence_id": f"s{number}",
            "estimator": "previous",
            "controller": "fixed" if fit == "asked" else "rate:gain=4",
            "fit": fit,
            "size": 64,
            "hit_argmax": np.float32(num / steps),
            "set_size_mean": 64.0,
            "neg_log_mass_nats": 0.1,
            "num_scored": steps,
        }
        for number, (*found, steps) in enumerate(hits)
        for fit, num in zip(("asked", "own", "shuffled"), found, strict=True)
    ]
    results: Any = _Fake({"vocab": pd.DataFrame(rows), "summary": pd.DataFrame()})
    text, table = controllers(results)
    cells = table.rows[0]  # type: ignore[attr-defined]
    total = sum(steps for *_, steps in hits)
    base, own, shuffled = (sum(one[place] for one in hits) / total for place in range(3))
    assert float(cells[2].key) == pytest.approx(base)
    assert float(cells[4].key) == pytest.approx(own)
    assert float(cells[5].key) == pytest.approx(own - base, abs=1e-9)
    assert float(cells[7].key) == pytest.approx(own - shuffled, abs=1e-9)
    drawn = np.random.default_rng(0).integers(len(hits), size=(1000, len(hits))).tolist()
    gains = [
        sum(hits[one][1] - hits[one][0] for one in draw) / sum(hits[one][3] for one in draw)
        for draw in drawn
    ]
    ends_of = np.quantile(gains, [(1 - 0.95) / 2, (1 + 0.95) / 2], method="inverted_cdf")
    if len(hits) < 3:
        assert cells[6].text == "n/a"
    else:
        ends = [float(one) / 100 for one in re.findall(r"[+-][\d.]+", cells[6].text)]
        assert ends == pytest.approx(ends_of.tolist(), abs=6e-5)
    assert "size" in text.text  # type: ignore[attr-defined]


class _Fake:
    """Just what a table of controllers needs."""

    def __init__(self, frames: dict[str, pd.DataFrame]) -> None:
        self.run, self._frames = {"seed": 0}, frames
        self.summary = pd.DataFrame(columns=["question", "name", "family"])

    def table(self, table: Table) -> pd.DataFrame:
        return self._frames[table.name]


def test_without_a_controller_nothing_is_said_of_gains(results: Results) -> None:
    assert controllers(_with(results, {VOCAB_RESULTS: results.table(VOCAB_RESULTS)})) == []


@pytest.mark.parametrize(("is_apart", "said"), [(True, "is supported"), (False, "is not shown")])
def test_whether_attention_points_ahead_depends_on_chance(
    results: Results, is_apart: bool, said: str
) -> None:
    rows = make_attended(is_apart=is_apart)
    text, table = foretelling(_with(results, {ATTENDED_SUMMARY: rows}))
    assert said in text.text  # type: ignore[attr-defined]
    heads = [row[0].text for row in table.rows]  # type: ignore[attr-defined]
    assert heads == ["all heads, mean", "layer 0, head 1", "layer 1, head 0", "layer 0, head 0"]


def test_drift_rises_where_the_intervals_of_short_and_long_are_apart(results: Results) -> None:
    text, table = drift(results)
    assert "over 1 row it rises (0.3 at 1 to 64 tokens, 0.5 at 129 to 320)" in text.text  # type: ignore[attr-defined]
    assert "over 16 rows it does not change beyond its interval" in text.text  # type: ignore[attr-defined]
    assert len(table.rows) == 3  # type: ignore[attr-defined]
