"""Counts of the other prompts, against loops; the own prompt never gets in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import InputError, TracekitError
from tracekit.vocab.fit import Fit, OtherPrompts

PAIRS = st.lists(st.tuples(st.sampled_from(["a", "b", "long-prompt"]), st.integers(0, 6)))


@given(PAIRS)
def test_counts_without_a_prompt_are_those_of_a_trace_without_it(
    pairs: list[tuple[str, int]],
) -> None:
    tokens = np.array([token for _, token in pairs], dtype=np.int64)
    fit = Fit.count(tokens, np.array([prompt for prompt, _ in pairs], dtype=object), num_rows=7)
    for own in ("a", "b", "long-prompt", "elsewhere"):
        others = fit.without(own)
        wanted = [sum(p != own and t == token for p, t in pairs) for token in range(7)]
        assert others.counts_V.tolist() == wanted
        assert others.counted == {p for p, _ in pairs} - {own}
        assert others.prompt_id == own


def test_a_prompt_that_was_counted_cannot_be_evaluated() -> None:
    with pytest.raises(TracekitError, match="'a' was counted"):
        OtherPrompts("a", frozenset({"a", "b"}), torch.zeros(3))


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_without_a_row_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"token id {token} "):
        Fit.count(np.array([0, token]), np.array(["a", "a"]), num_rows=5)
