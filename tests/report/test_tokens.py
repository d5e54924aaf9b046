from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import ESTIMATORS, HOSTILE, make_results, write_table
from tests.report.fake_shown import TRIED_FROM, add_shown
from tracekit import schema
from tracekit.report.blocks import Absent, Details, Section
from tracekit.report.formats import visible
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.readable import label, readable
from tracekit.report.sections import tokens
from tracekit.report.sections.tokens_shown import (
    MOST_TOKENS,
    ShownSequence,
    choose_policies,
    choose_schemes,
    shown_sequences,
)
from tracekit.report.tables import HtmlTable
from tracekit.report.tokens import EDGES_NATS, LEAST_PROB, TokenText, Views

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("tokens") / "results"
    make_results(folder, num_sequences=6, hostile=HOSTILE)
    return load_results(add_shown(folder))


def text_of(sequence: ShownSequence, policies: tuple[str, ...] = ()) -> TokenText:
    return TokenText(sequence=sequence, policies=policies, schemes=())


def data_of(text: TokenText) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(text.json)
    return read


@given(st.text(st.characters(), max_size=12))
def test_readable_text_has_no_hidden_character(text: str) -> None:
    shown = readable(text)
    assert shown.strip()
    for char in shown.replace("\n", "").replace("\t", ""):
        assert unicodedata.category(char) not in HIDDEN
    assert not unicodedata.category(shown[0]).startswith("M")


@given(st.text(st.characters(), max_size=12))
def test_visible_text_equals_a_loop_over_its_characters(text: str) -> None:
    slow = ""
    for char in text:
        hidden = unicodedata.category(char) in HIDDEN
        slow += f"<U+{ord(char):04X}>" if hidden and char not in "\n\t" else char
    assert visible(text) == slow


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n", "\u21b5\n"),
        (r".\n", ".\\n\n"),
        ("\t", "\u21e5\t"),
        ("  ", "\u2423\u2423"),
        (" the", " the"),
        ("\u00a0", "<U+00A0>"),
        ("", "\u2205"),
        ("\u200b", "<U+200B>"),
        ("a\u200db", "a<U+200D>b"),
        ("\u202e", "<U+202E>"),
        ("\ud800", "<U+D800>"),
        ("\u3164", "<U+3164>"),
        ("\ufe0f", "<U+FE0F>"),
        ("\u0301", "\u25cc\u0301"),
        ("e\u0301", "e\u0301"),
        ("<0xF0>", "<0xF0>"),
    ],
)
def test_each_kind_of_token_can_be_read(text: str, shown: str) -> None:
    assert readable(text) == shown


def test_a_label_is_one_line_with_spaces_that_can_be_seen() -> None:
    assert label(" a b\n") == "\u2423a\u2423b\u21b5"
    assert label("\t") == "\u21e5"


def test_each_entropy_class_has_its_edges(results: Results) -> None:
    first = shown_sequences(results)[0]
    entropies = [0.0, *(edge + step for edge in EDGES_NATS for step in (-0.01, 0.01))]
    first.rows.loc[1 : len(entropies), "entropy_nats"] = entropies
    looks = [look for look, _ in text_of(first).tokens]
    assert looks[0] == "q"
    for entropy, look in zip(entropies, looks[1:], strict=False):
        assert look.split()[0] == f"e{sum(entropy >= edge for edge in EDGES_NATS)}"
    views = Views(policies=(), schemes=())
    assert [name for name, _ in views.nats] == [f"e{n}" for n in range(len(EDGES_NATS) + 1)]
    assert views.edges == "5 25 70 150 300"


def test_given_generated_and_special_tokens_are_told_apart(results: Results) -> None:
    first = shown_sequences(results)[0]
    first.rows.loc[3, "text"] = "\u27e6<s>\u27e7"
    looks = [look.split() for look, _ in text_of(first).tokens]
    made = first.rows["is_generated"].tolist()
    assert ["g" in look for look in looks] == made
    assert [n for n, look in enumerate(looks) if "b" in look] == [TRIED_FROM]
    assert [n for n, look in enumerate(looks) if "s" in look] == [3]
    assert f"{len(made)} tokens, {sum(made)} generated" in text_of(first).summary


def test_the_data_are_the_numbers_of_each_token(results: Results) -> None:
    for one in shown_sequences(results):
        data = data_of(text_of(one))
        assert len(data["likely"]) == len(one.rows)
        rows: Any = one.rows.itertuples(index=False)
        for place, row in enumerate(rows):
            if np.isnan(row.entropy_nats):
                assert data["entropy"][place] is data["rank"][place] is None
                assert data["likely"][place] == []
                continue
            assert data["entropy"][place] / 100 == pytest.approx(row.entropy_nats, abs=0.0051)
            assert data["surprisal"][place] / 100 == pytest.approx(row.surprisal_nats, abs=0.0051)
            assert data["rank"][place] == row.rank
            slow: list[tuple[str, float]] = []
            for text, prob in zip(row.top_texts, row.top_probs, strict=True):
                if slow and prob < LEAST_PROB:
                    break
                slow.append((label(text), prob))
            flat = data["likely"][place]
            names = [data["texts"][number].replace(" ", "\u2423") for number in flat[::2]]
            assert names == [name for name, _ in slow]
            assert np.array(flat[1::2]) / 1000 == pytest.approx([p for _, p in slow], abs=0.0011)


@given(
    st.lists(st.none() | st.integers(0, 90), min_size=1, max_size=30).filter(
        lambda heads: any(one is not None for one in heads)
    )
)
def test_parts_of_heads_are_read_back_to_a_percent(heads: list[int | None]) -> None:
    held = [np.nan if one is None else one / 90 for one in heads]
    written = _written(held)
    for place, part in enumerate(held):
        percent = int(written[2 * place : 2 * place + 2], 16)
        if np.isnan(part):
            assert percent == 255
        else:
            assert abs(percent - 100 * part) <= 1
            # All and none are said of all and none alone.
            assert (percent == 100) == (part == 1)
            assert (percent == 0) == (part == 0)


def _written(held: list[float]) -> str:
    from tracekit.report.load import Point
    from tracekit.report.sections.tokens_shown import Left

    policy = Point("p", "p", "local", True, "kept_frac", 0.25, 0.4, 0.1, 0.1, 0.1, 3, 0)
    num = len(held)
    rows = pd.DataFrame(
        {
            "text": ["a"] * num,
            "is_generated": [False] * num,
            **dict.fromkeys(("entropy_nats", "surprisal_nats", "rank"), [1.0] * num),
            **dict.fromkeys(("top_texts", "top_probs"), [None] * num),
        }
    )
    one = ShownSequence(
        sequence_id="a#0",
        domain="",
        num_tokens=num,
        rows=rows,
        left=(Left(policy, 1, "", float(np.nanmean(held)), np.array(held)),),
        missed=(),
    )
    written: str = data_of(text_of(one, ("p",)))["held"][0][0]
    return written


def test_marks_of_pruned_tokens_are_those_of_the_candidates(results: Results) -> None:
    rows = results.table(schema.CANDIDATES)
    first = shown_sequences(results)[0]
    names = tuple(one.scheme.family for one in first.missed)
    text = TokenText(sequence=first, policies=(), schemes=(*names, "not there"))
    *missed, nothing = data_of(text)["missed"]
    assert nothing is None
    assert len(missed) == len(names) == len(ESTIMATORS) - 1
    for name, (start, marks, told) in zip(names, missed, strict=True):
        mine = rows[
            (rows["estimator"] == name)
            & (rows["size"] == 1024)
            & (rows["sequence_id"] == first.sequence_id)
        ].sort_values("position")
        assert start == mine["position"].iloc[0]
        assert marks == "".join(".x"[not hit] for hit in mine["hit_argmax"])
        assert f"at {marks.count('x')} of {len(marks)} steps" in told


def test_policies_are_shown_at_a_quarter_the_best_first_and_bounds_not(results: Results) -> None:
    chosen = choose_policies(results)
    assert {one.asked for one in chosen} == {0.25}
    assert [one.family for one in chosen] == ["snapkv", "h2o", "streaming", "knorm", "random"]
    schemes = choose_schemes(results)
    assert {one.x for one in schemes} == {1024}
    assert [one.family for one in schemes] == ["lowrank", "previous", "frequency"]


def test_a_policy_that_leaves_all_is_not_shown(tmp_path: Path) -> None:
    folder = add_shown(make_results(tmp_path / "r", num_sequences=3))
    held = load_results(folder).table(schema.HELD).copy()
    is_one = held["family"] == "knorm"
    held.loc[is_one, "held_frac"] = held.loc[is_one, "held_frac"].map(np.ones_like)
    write_table(folder, schema.HELD, held)
    shown = shown_sequences(load_results(folder))
    for one in shown:
        assert [part.policy.family for part in one.left] == ["snapkv", "h2o", "streaming", "random"]


def test_no_text_can_break_out_of_the_data(results: Results) -> None:
    for one in shown_sequences(results):
        written = text_of(one).json
        assert "<script>alert(1)</script>" in json.loads(written)["texts"]
        assert not set("<>&\u2028\u202e\x00") & set(written)


def test_a_long_sequence_is_cut_and_it_is_said(tmp_path: Path) -> None:
    folder = make_results(tmp_path / "r", num_sequences=3)
    results = load_results(add_shown(folder, num_tokens=MOST_TOKENS + 5))
    (one,) = shown_sequences(results)
    assert (one.num_tokens, len(one.rows)) == (MOST_TOKENS + 5, MOST_TOKENS)
    text = TokenText(sequence=one, policies=("snapkv",), schemes=("lowrank",))
    assert "the first 4\u202f000 shown" in text.summary
    assert len(list(text.tokens)) == MOST_TOKENS
    made = tokens.section(results, Options())
    assert isinstance(made, Section)
    assert f"Cut after 4\u202f000 tokens: {one.sequence_id}." in made.blocks[0].text  # type: ignore[attr-defined]
    spans = sum(len(f'<span class="{look}">{word}</span>') for look, word in text.tokens)
    assert (spans + len(text.json.encode())) / MOST_TOKENS < 120


def test_the_least_sure_steps_are_those_of_highest_entropy(results: Results) -> None:
    made = tokens.section(results, Options())
    assert isinstance(made, Section)
    tables = [part for part in made.parts() if isinstance(part, HtmlTable)]
    unsure = next(one for one in tables if one.name == "table-unsure-1")
    rows = shown_sequences(results)[0].rows
    highest = sorted(rows["entropy_nats"].dropna(), reverse=True)[:20]
    found = [float(row[2].key) for row in unsure.rows]
    assert found == pytest.approx(highest, rel=1e-6)


def test_all_shown_sequences_are_there_the_first_one_open(results: Results) -> None:
    made = tokens.section(results, Options())
    assert isinstance(made, Section)
    texts = [part for part in made.parts() if isinstance(part, TokenText)]
    assert [one.sequence.sequence_id for one in texts] == list(
        results.table(schema.SHOWN)["sequence_id"].unique()
    )
    assert texts[0] in made.blocks
    folded = [one for one in made.blocks if isinstance(one, Details) and texts[1] in one.blocks]
    assert len(folded) == 1


def test_what_is_not_known_is_said_with_a_command(tmp_path: Path) -> None:
    folder = make_results(tmp_path / "r", num_sequences=3)
    made = tokens.section(load_results(folder), Options())
    assert isinstance(made, Section)
    commands = [part.command for part in made.parts() if isinstance(part, Absent)]
    assert [one.split()[5] for one in commands] == ["--kv", "--vocab"]
    (folder / "shown.parquet").unlink()
    nothing = tokens.section(load_results(folder), Options())
    assert isinstance(nothing, Absent)
    assert nothing.what == "No sequences to show"
