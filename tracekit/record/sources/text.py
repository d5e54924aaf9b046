"""Sequences from existing text: it is scored as it is, whole or in windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from tracekit.errors import UsageError
from tracekit.record.encode import accept_tokenizer, encode_raw
from tracekit.record.job import Job, Skipped
from tracekit.record.rendered import Rendered
from tracekit.record.rendering import DEFAULT_RENDERING, Rendering
from tracekit.record.source import Source, accept_count, source_settings
from tracekit.record.sources.windows import Window, windows
from tracekit.record.text_files import Text, digest, read_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class _Tokenised:
    """The tokens of a text with their characters, what stands before each window, its windows."""

    text: Text
    before_ids: tuple[int, ...]
    id_T: NDArray[np.int64]
    start_T: NDArray[np.int64]
    end_T: NDArray[np.int64]
    windows: list[Window]

    def rendered(self, window: Window) -> Rendered:
        """Return one window as the model reads it."""
        own_ids = self.id_T[window.start : window.stop].tolist()
        num_before, num_tokens = len(self.before_ids), len(self.before_ids) + len(own_ids)
        # White space that the tokenizer trimmed stands before the first token.
        low = min(self.end_T[window.start - 1], self.start_T[window.start]) if window.start else 0
        return Rendered(
            ids=(*self.before_ids, *own_ids),
            roles=(None,) * num_tokens,
            turns=(0,) * num_tokens,
            is_template=(True,) * num_before + (False,) * len(own_ids),
            spans=(None,) * num_tokens,
            context_end=None,
            turn_ends=(),
            answer_turn=0,
            text=self.text.text[low : self.end_T[window.stop - 1]],
        )


@final
class TextSource(Source):
    """Sequences from existing text: ``notes.txt#w0000``, ``notes.txt#w0001`` ...

    Parameters
    ----------
    paths
        A file, a folder (each file in it, hidden ones left out), or several of both. Each file is
        one text, tokenised in one go, so that windows change no token.
    rendering
        Special tokens in the text or not. A text has no chat template.
    window
        Tokens of a window, the tokenizer's BOS before each included; None: a text is one sequence.
    stride
        Tokens from the start of one window to the start of the next, at most ``window``; None: as
        many as ``window``. Each token counts in the first window that holds it, see ``windows``,
        which also says where windows move by one token less.
    limit
        The first so many windows only.
    domain
        Kind of text.

    Raises
    ------
    InputError
        If no file gives a text, or two have the same name. Otherwise a file that is not UTF-8 or
        blank is skipped.
    UsageError
        If a number is too small, the stride larger than the window or without one, or the format
        ``chat``.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        rendering: Rendering = DEFAULT_RENDERING,
        window: int | None = None,
        stride: int | None = None,
        limit: int | None = None,
        domain: str = "text",
    ) -> None:
        accept_count("window", window, 2)
        accept_count("stride", stride)
        accept_count("limit", limit)
        if stride is not None and window is None:
            msg = f"stride {stride} is the way from one window to the next: give a window as well."
            raise UsageError(msg)
        if stride is not None and stride > (window or 0):
            msg = f"stride {stride} needs a window of as many tokens, or some would be left out."
            raise UsageError(msg)
        if rendering.format == "chat":
            msg = "--text is scored as it is: it has no chat template, so leave out --chat."
            raise UsageError(msg)
        # An unknown tokenizer has tokenised nothing yet.
        self._tokenizer: Any = None
        self._tokenised: list[_Tokenised] = []
        self._rendering = replace(rendering, format="raw")
        self._window, self._stride, self._limit = window, stride or window, limit
        self._domain = domain
        given = [paths] if isinstance(paths, str | Path) else list(paths)
        self.name = ", ".join(str(path) for path in given)
        self._texts, self._skipped = read_texts([Path(path) for path in given])
        self.sha256 = digest(self._texts)

    def settings(self) -> dict[str, Any]:
        """Return what decides which sequences there are."""
        return source_settings(
            "text",
            self._rendering,
            window=self._window,
            stride=self._stride,
            domain=self._domain,
        )

    def count(self, tokenizer: Any) -> int:
        """Return how many sequences there are."""
        count = sum(len(one.windows) for one in self._tokenise(tokenizer))
        return len(self._skipped) + (count if self._limit is None else min(count, self._limit))

    def jobs(self, tokenizer: Any) -> Iterator[Job | Skipped]:
        """Yield the windows of one text after the other."""
        tokenised = self._tokenise(tokenizer)
        yield from self._skipped
        for one in tokenised:
            if not one.windows:
                yield Skipped(one.text.name, "the tokenizer gives no tokens for it.")
        yield from islice(self._windows(tokenised), self._limit)

    def _windows(self, tokenised: list[_Tokenised]) -> Iterator[Job]:
        for one in tokenised:
            for number, window in enumerate(one.windows):
                yield Job(
                    sequence_id=f"{one.text.name}#w{number:04d}",
                    prompt_id=one.text.name,
                    domain=self._domain,
                    parts=(one.rendered(window),),
                    max_new_tokens=0,
                    is_given=True,
                    text_start=window.start,
                    scored_from=window.first_new - window.start + len(one.before_ids),
                    rendering=self._rendering,
                )

    def _tokenise(self, tokenizer: Any) -> list[_Tokenised]:
        """Return the texts as tokens; asked again with the same tokenizer, the same ones."""
        if self._tokenizer is not tokenizer:
            accept_tokenizer(tokenizer)
            self._tokenised = [self._tokens_of(text, tokenizer) for text in self._texts]
            self._tokenizer = tokenizer
        return self._tokenised

    def _tokens_of(self, text: Text, tokenizer: Any) -> _Tokenised:
        before, own = encode_raw(text.text, tokenizer, is_literal=self._rendering.is_literal)
        size = self._window or max(len(before) + len(own), 2)
        table = np.array(own, dtype=np.int64).reshape(-1, 3)
        return _Tokenised(
            text=text,
            before_ids=tuple(token for token, _, _ in before),
            id_T=table[:, 0],
            start_T=table[:, 1],
            end_T=table[:, 2],
            windows=windows(len(own), size, self._stride or size, len(before)) if own else [],
        )
