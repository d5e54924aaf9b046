"""Windows over a text in which each of its tokens counts once."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.errors import UsageError


@dataclass(frozen=True)
class Window:
    """The tokens ``start`` to ``stop`` of a text, of which those from ``first_new`` on count."""

    start: int
    stop: int
    first_new: int


def windows(num_tokens: int, window: int, stride: int, num_before: int) -> list[Window]:
    """Return windows over a text in which each token that has a context counts exactly once.

    Parameters
    ----------
    num_tokens
        Of the text, without what stands before each window.
    window
        Tokens of a window, those before it included.
    stride
        Tokens from the start of one window to the start of the next; at most ``window``.
    num_before
        Tokens that the tokenizer puts before each window (a BOS); their own scores do not count.

    Returns
    -------
    list of Window
        Each token counts in the first window that holds it, where its context is the longest. The
        first token of a text without anything before it has no context and counts nowhere.

    Raises
    ------
    UsageError
        If a window has no room for a token with a context.

    Notes
    -----
    Where nothing stands before a window, its first token has no context there, so that windows
    overlap by one token at least; where a BOS takes one place of each window, they move by one
    token less than ``window`` at most, or tokens would be left out. The last window is moved back
    to be as long as the others: it costs a few tokens more and gives a longer context than a short
    one would.
    """
    size = window - num_before
    step = min(stride, window - max(num_before, 1))
    if step < 1:
        msg = (
            f"window {window} has no room for text beside the {num_before} tokens that the "
            "tokenizer puts before it; make it longer."
        )
        raise UsageError(msg)
    last = max(num_tokens - size, 0)
    starts = [*range(0, last, step), last]
    first_new = [min(1, num_tokens) if num_before == 0 else 0]
    first_new += [start + size for start in starts[:-1]]
    return [
        Window(start, min(start + size, num_tokens), new)
        for start, new in zip(starts, first_new, strict=True)
    ]
