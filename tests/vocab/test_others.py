"""What is learned from other prompts, against loops; the own prompt never gets in."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import InputError, TracekitError
from tracekit.vocab import others as others_module
from tracekit.vocab.others import FOLDS, Corpus, Others, Text, example_rows

if TYPE_CHECKING:
    from tracekit.vocab.controller import Run

PAIRS = st.lists(st.tuples(st.sampled_from(["a", "b", "long-prompt"]), st.integers(0, 6)))


def no_runs() -> tuple[list[Run], list[int]]:
    return [], []


def text(prompt_id: str, ids: list[int], sample: int = 0, rows: list[int] | None = None) -> Text:
    """Return a text whose hidden state at row t is [t, first token]."""
    ids_T = torch.tensor(ids, dtype=torch.int64)
    first = ids[0] if ids else 0
    hidden_TE = torch.tensor([[float(t), float(first)] for t in range(len(ids))])
    scored = list(range(len(ids) - 1)) if rows is None else rows
    return Text(
        sequence_id=f"{prompt_id}-{sample}",
        prompt_id=prompt_id,
        domain="story",
        token_ids_T=ids_T,
        is_generated_T=torch.ones(len(ids), dtype=torch.bool),
        scored_S=torch.tensor(scored, dtype=torch.int64),
        hidden=lambda: hidden_TE,
        runs=no_runs,
    )


def corpus(num_prompts: int, *, samples: int = 1, length: int = 4) -> Corpus:
    texts = [
        text(f"p{number:02}", [number] * length, sample)
        for number in range(num_prompts)
        for sample in range(samples)
    ]
    return Corpus(tuple(texts), 100)


@given(PAIRS)
def test_counts_without_a_prompt_are_those_of_a_trace_without_it(
    pairs: list[tuple[str, int]],
) -> None:
    texts = tuple(text(prompt, [token], place) for place, (prompt, token) in enumerate(pairs))
    for own in ("a", "b", "long-prompt", "elsewhere"):
        others = Corpus(texts, 7).without(own)
        wanted = Counter(token for prompt, token in pairs if prompt != own)
        counts_V = others.counts(lambda one: one.token_ids_T)
        assert counts_V.tolist() == [wanted[token] for token in range(7)]
        assert {one.prompt_id for one in others.texts} == {p for p, _ in pairs} - {own}


def test_all_samples_of_the_own_prompt_are_left_out() -> None:
    others = corpus(3, samples=2).without("p01")
    assert [one.sequence_id for one in others.texts] == ["p00-0", "p00-1", "p02-0", "p02-1"]


def test_a_prompt_among_its_own_others_is_refused() -> None:
    whole = corpus(2)
    with pytest.raises(TracekitError, match="'p00' is among its own others"):
        Others("p00", "", whole.texts, whole)


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_without_a_row_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"token id {token} of a-0 has no row in a head of 5"):
        Corpus((text("a", [0, token]),), 5)


def test_prompts_are_dealt_to_folds_in_turn_and_samples_stay_together() -> None:
    whole = corpus(12, samples=2)
    folds = [whole.without(f"p{number:02}").fold for number in range(12)]
    assert folds == [number % FOLDS for number in range(12)]


def test_examples_are_of_other_folds_alone_and_the_same_for_a_whole_fold() -> None:
    whole = corpus(12)
    for number in range(12):
        hidden_XE, chosen_X = example_rows(whole.without(f"p{number:02}"))
        firsts = {int(first) for first in hidden_XE[:, 1]}
        assert firsts == {other for other in range(12) if other % FOLDS != number % FOLDS}
        assert len(hidden_XE) == len(chosen_X) == 3 * len(firsts)
        assert hidden_XE[:, 1].tolist() == chosen_X.tolist()


def test_an_example_is_a_state_and_the_token_that_came_after_it() -> None:
    texts = text("a", [0, 1]), text("b", [5, 6, 7, 8, 9], rows=[1, 3])
    hidden_XE, chosen_X = example_rows(Corpus(texts, 10).without("a"))
    assert hidden_XE.tolist() == [[1.0, 5.0], [3.0, 5.0]]
    assert chosen_X.tolist() == [7, 9]


@pytest.mark.parametrize("most", [1, 5, 20, 1000])
def test_examples_are_no_more_than_allowed_and_from_every_text(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others_module, "NUM_EXAMPLES", most)
    texts = [text("own", [0, 0])] + [text(f"p{n}", [n + 1] * 41) for n in range(4)]
    others = Corpus(tuple(texts), 10).without("own")
    sizes = [len(chosen_X) for _, chosen_X in others.examples()]
    assert len(sizes) == 4
    # Each text begins anew, with its first step.
    assert sum(sizes) <= most + 4
    assert max(sizes) - min(sizes) == 0


def test_a_trace_without_steps_to_learn_from_says_so() -> None:
    texts = text("own", [0, 0]), text("b", [1, 1], rows=[])
    others = Corpus(texts, 10).without("own")
    assert list(others.examples()) == []
    with pytest.raises(InputError, match="no other prompt has a decoded step"):
        example_rows(others)


def test_what_is_fitted_on_others_is_made_once_a_prompt() -> None:
    whole, made = corpus(7), []

    def make(name: str) -> str:
        made.append(name)
        return name

    for _ in range(2):
        for name in ("p00", "p05"):
            assert whole.without(name).fitted("key", partial(make, name)) == name
    assert made == ["p00", "p05"]


def test_what_is_fitted_by_fold_is_shared_by_the_prompts_of_a_fold_alone() -> None:
    whole, made = corpus(7), []

    def make(name: str) -> str:
        made.append(name)
        return name

    found = [
        whole.without(name).fitted_by_fold("key", partial(make, name))
        for name in ("p00", "p05", "p01", "p06")
    ]
    assert found == ["p00", "p00", "p01", "p01"]
    assert made == ["p00", "p01"]
    assert whole.without("p00").fitted_by_fold("other", lambda: make("again")) == "again"
    assert whole.without("p00").fitted("key", lambda: make("apart")) == "apart"
