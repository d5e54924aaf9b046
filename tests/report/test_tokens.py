from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import HOSTILE, make_results
from tracekit.report.formats import visible
from tracekit.report.load import load_results
from tracekit.report.tokens import EDGES_NATS, legend, readable, shown_sequences

if TYPE_CHECKING:
    from pathlib import Path


@given(st.text(st.characters(), max_size=12))
def test_readable_text_has_no_hidden_character(text: str) -> None:
    shown = readable(text)
    assert shown.strip() or shown in {" "}
    for char in shown.replace("\n", "").replace("\t", ""):
        assert unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


@given(st.text(st.characters(), max_size=12))
def test_visible_text_equals_a_loop_over_its_characters(text: str) -> None:
    slow = ""
    for char in text:
        hidden = unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
        slow += f"<U+{ord(char):04X}>" if hidden and char not in "\n\t" else char
    assert visible(text) == slow


def test_whitespace_can_be_read() -> None:
    assert readable("\n") == "\u21b5\n"
    assert readable(r".\n") == ".\\n\n"
    assert readable("\t") == "\u21e5\t"
    assert readable("  ") == "\u2423\u2423"
    assert readable(" the") == " the"
    assert readable("\u00a0") == "<U+00A0>"
    assert readable("") == "\u2205"


def test_each_entropy_class_has_its_edges(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=3))
    entropies = [0.0, *(edge + step for edge in EDGES_NATS for step in (-0.01, 0.01))]
    results.shown.loc[1 : len(entropies), "entropy_nats"] = entropies
    tokens = shown_sequences(results)[0].tokens[1 : len(entropies) + 1]
    for entropy, token in zip(entropies, tokens, strict=True):
        number = sum(entropy >= edge for edge in EDGES_NATS)
        assert f"e{number}" in token.classes.split()
        assert f"entropy {entropy:.2f} nats" in token.facts
    assert [name for name, _ in legend()] == [f"e{n}" for n in range(len(EDGES_NATS) + 1)]


def test_prompt_and_first_tokens_are_told_apart(tmp_path: Path) -> None:
    results = load_results(make_results(tmp_path / "r", num_sequences=3, hostile=HOSTILE))
    first, *_ = shown_sequences(results)
    assert first.tokens[0].facts == "position 0: not predicted"
    made = [token.classes.split()[-1] != "p" for token in first.tokens]
    assert made == sorted(made)
    assert f"{len(made)} tokens, {sum(made)} generated" in first.summary
    assert "likely: <script>alert(1)</script> " in first.tokens[1].facts
