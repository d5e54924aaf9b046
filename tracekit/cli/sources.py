"""From the flags of ``tracekit record`` to what is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from tracekit.record.source import Source


def source_of(
    *,
    prompts: str | None,
    text: list[str] | None,
    conversations: str | None,
    window: int | None,
    stride: int | None,
    limit: int | None,
    samples: int,
    chat: bool | None,
    special_tokens: str,
) -> Source:
    """Return the source that the flags name.

    Raises
    ------
    UsageError
        If they name two, or a flag does not belong to the one.
    """
    from tracekit.record.prompts import read_prompts
    from tracekit.record.rendering import Rendering
    from tracekit.record.sources.conversations import ConversationSource
    from tracekit.record.sources.prompts import PromptSource
    from tracekit.record.sources.text import TextSource

    named = {"--prompts": prompts, "--text": text, "--conversations": conversations}
    given = [flag for flag, value in named.items() if value]
    if len(given) > 1:
        msg = f"{' and '.join(given)} are two sources; record each into a trace of its own."
        raise UsageError(msg)
    if not text and (window is not None or stride is not None):
        msg = "--window and --stride cut --text; give a text file."
        raise UsageError(msg)
    if samples != 1 and (text or conversations):
        msg = "--samples are answers to prompts; text and conversations are scored as they are."
        raise UsageError(msg)
    form = "auto" if chat is None else "chat" if chat else "raw"
    rendering = Rendering(format=form, special_tokens=special_tokens)
    if text:
        return TextSource(text, rendering, window=window, stride=stride, limit=limit)
    if conversations:
        return ConversationSource(conversations, rendering, limit=limit)
    return PromptSource(read_prompts(prompts or "core"), rendering, samples=samples, limit=limit)


def parse_maps(text: str) -> tuple[int, ...] | Literal["all"]:
    """Return the layers that ``0,5,-1`` or ``all`` names.

    Raises
    ------
    UsageError
        If it names none.
    """
    if text == "all":
        return "all"
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        msg = f"--maps {text!r} names no layers; write numbers with commas (0,5,-1), or all."
        raise UsageError(msg) from None
