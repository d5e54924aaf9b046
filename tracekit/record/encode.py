"""From characters to tokens that know their characters."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tracekit.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Token = tuple[int, int, int]
"""An id, with the first character and the end of what it stands for."""


def accept_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot say which characters a token stands for.

    Raises
    ------
    ModelError
        If it is no fast tokenizer.
    """
    if not tokenizer.is_fast:
        msg = "the tokenizer gives no character offsets; use a fast tokenizer (tokenizer.json)."
        raise ModelError(msg)


def encode_raw(text: str, tokenizer: Any, *, is_literal: bool) -> tuple[list[Token], list[Token]]:
    """Return the tokens that stand before a text, and its own.

    Parameters
    ----------
    text
        Without chat template.
    tokenizer
        What it puts before a text (a BOS) is kept. What it would put after one (an EOS) is left
        out: the text goes on, or ends because its file does.
    is_literal
        Whether names of special tokens are plain words. If not, and the text begins with what the
        tokenizer would put before it, that is there once and counts as put there.
    """
    made = _call(tokenizer, text, split_special_tokens=is_literal, return_special_tokens_mask=True)
    is_added = made["special_tokens_mask"]
    tokens = _triples(made)
    first = next((n for n, added in enumerate(is_added) if not added), len(tokens))
    last = next((n for n in range(len(tokens), first, -1) if not is_added[n - 1]), first)
    before, own = tokens[:first], tokens[first:last]
    if is_literal:
        return before, own
    own = _one_bos(own, tokenizer.bos_token_id)
    if [token for token, _, _ in own[:first]] == [token for token, _, _ in before]:
        return own[:first], own[first:]
    return before, own


def encode_more(text: str, tokenizer: Any, *, is_literal: bool) -> list[Token]:
    """Return the tokens of a text that goes on: nothing is put before it."""
    return _triples(
        _call(tokenizer, text, add_special_tokens=False, split_special_tokens=is_literal)
    )


def encode_chat(
    text: str, is_written_C: NDArray[np.bool_], tokenizer: Any, *, is_literal: bool
) -> list[Token]:
    """Return the tokens of a chat: nothing is put before it but what its template writes.

    If literal, control tokens come from the template, never from a message. The whole is tokenised
    at once. Where a message spells a special token, the stretch between the template's own control
    tokens around it is tokenised again as plain words: tokenizers cut at control tokens before all
    else, so that the rest keeps its ids. If not literal, a first message that spells a BOS after
    the template's own gives no second one.
    """
    tokens = encode_more(text, tokenizer, is_literal=False)
    if not is_literal:
        return _one_bos(tokens, tokenizer.bos_token_id)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    found = [n for n, (token, _, _) in enumerate(tokens) if token in special]
    forged = [n for n in found if is_written_C[tokens[n][1]]]
    real = sorted(set(found) - set(forged))
    for left, right in reversed(list(pairwise([-1, *real, len(tokens)]))):
        if any(left < n < right for n in forged):
            low = tokens[left][2] if left >= 0 else 0
            high = tokens[right][1] if right < len(tokens) else len(text)
            plain = encode_more(text[low:high], tokenizer, is_literal=True)
            tokens[left + 1 : right] = [(i, low + start, low + end) for i, start, end in plain]
    return tokens


def _one_bos(tokens: list[Token], bos_id: int | None) -> list[Token]:
    """Return the tokens with one BOS at their head where there are several."""
    count = next((n for n, (token, _, _) in enumerate(tokens) if token != bos_id), len(tokens))
    return tokens[max(count - 1, 0) :]


def bounds(tokens: list[Token]) -> list[tuple[int, int]]:
    """Return the characters of each token, white space that the tokenizer trimmed given back."""
    found, reached = [], 0
    for _, start, end in tokens:
        is_added = start == end <= reached
        found.append((reached, reached) if is_added else (min(start, reached), end))
        reached = max(reached, end)
    return found


def _call(tokenizer: Any, text: str, **how: bool) -> Any:
    return tokenizer(text, return_offsets_mapping=True, verbose=False, **how)


def _triples(made: Any) -> list[Token]:
    pairs = zip(made["input_ids"], made["offset_mapping"], strict=True)
    return [(token, start, end) for token, (start, end) in pairs]
