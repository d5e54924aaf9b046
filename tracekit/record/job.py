"""What the recorder runs: one sequence, known before any of it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.record.rendering import DEFAULT_RENDERING, Rendering

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tracekit.record.prompt import Prompt
    from tracekit.record.rendered import Rendered


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sequence to record.

    Parameters
    ----------
    sequence_id
        Unique in its source.
    prompt_id, domain, sample
        The prompt, text or conversation that it is from, its kind, and the number of the sample.
    parts
        What is read. An answer follows each part, unless ``max_new_tokens`` is 0 or the text is
        given.
    max_new_tokens
        Most tokens of an answer; None leaves it to the caller.
    is_given
        The text is scored as it is and nothing is generated; there is one part.
    text_start
        Index in its text of the first token of this window, tokens that the tokenizer puts before
        each window not counted; None where the sequence is no window.
    scored_from
        First position whose token counts here; earlier ones count in the window before.
    check
        How the answer can be judged.
    prompt
        What was rendered; None for texts and conversations.
    prompt_end
        Tokens before the first answer; None where there is none.
    rendering
        How it was rendered.
    """

    sequence_id: str
    prompt_id: str
    domain: str
    sample: int = 0
    parts: tuple[Rendered, ...]
    max_new_tokens: int | None = None
    is_given: bool = False
    text_start: int | None = None
    scored_from: int = 1
    check: Mapping[str, Any] | None = None
    prompt: Prompt | None = None
    prompt_end: int | None = None
    rendering: Rendering = DEFAULT_RENDERING


@dataclass(frozen=True)
class Skipped:
    """A prompt, text, line or sequence that was left out, and why."""

    prompt: str
    why: str
