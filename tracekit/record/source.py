"""Where sequences come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.record.job import Job, Skipped
    from tracekit.record.lines import BadLine
    from tracekit.record.rendering import Rendering


class Source(ABC):
    """Where sequences come from: the same source gives the same ones, in the same order.

    Attributes
    ----------
    name
        As the user wrote it.
    sha256
        Of the bytes that were read.
    bad
        Lines that gave nothing.
    """

    name: str
    sha256: str
    bad: tuple[BadLine, ...] = ()

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return all that decides, besides the bytes, which sequences there are and their ids.

        The keys are those of ``source_settings``. A limit is none of them: a recording can go on
        with a higher one.
        """

    @abstractmethod
    def jobs(self, tokenizer: Any) -> Iterator[Job | Skipped]:
        """Yield the sequences one by one; what cannot be rendered is skipped and the rest goes on.

        Raises
        ------
        InputError
            If nothing can be rendered with this tokenizer.
        ModelError
            If the tokenizer knows no character offsets.
        """

    @abstractmethod
    def count(self, tokenizer: Any) -> int:
        """Return how many sequences there are, those that will be skipped counted as well."""


def source_settings(
    kind: str,
    rendering: Rendering,
    *,
    samples: int = 1,
    window: int | None = None,
    stride: int | None = None,
    domain: str | None = None,
) -> dict[str, Any]:
    """Return the settings of any source under the same keys, so that two can be compared."""
    return {
        "kind": kind,
        "samples": samples,
        "window": window,
        "stride": stride,
        "domain": domain,
        "format": rendering.format,
        "special_tokens": rendering.special_tokens,
    }


def accept_count(name: str, count: int | None, least: int = 1) -> None:
    """Refuse a number that is too small; None is no number.

    Raises
    ------
    UsageError
        In one sentence.
    """
    if count is not None and count < least:
        msg = f"{name} must be at least {least}, not {count}."
        raise UsageError(msg)
