"""Sequences from recorded conversations: all turns are scored, nothing is generated."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from tracekit.errors import InputError
from tracekit.record.encode import accept_tokenizer
from tracekit.record.job import Job, Skipped
from tracekit.record.lines import numbered_lines, parse_lines, read_bytes, why_nothing
from tracekit.record.prompt_line import conversation_from_json
from tracekit.record.render import render_conversation
from tracekit.record.rendering import DEFAULT_RENDERING, Rendering
from tracekit.record.source import Source, accept_count, source_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.record.rendered import Rendered


@final
class ConversationSource(Source):
    """Sequences from recorded conversations, one each: ``line-0007#0``.

    Parameters
    ----------
    file
        Path of a JSONL file: an object a line, with ``messages`` (role and content: perhaps the
        system's, then the user's and the assistant's in any order) and perhaps ``id`` and
        ``domain``.
    rendering
        Chat template or not, special tokens in messages or not.
    limit
        The first so many conversations only.

    Raises
    ------
    InputError
        If the file cannot be read, or no line of it gives a conversation.
    UsageError
        If the limit is below 1.
    """

    def __init__(
        self,
        file: str | Path,
        rendering: Rendering = DEFAULT_RENDERING,
        limit: int | None = None,
    ) -> None:
        accept_count("limit", limit)
        data = read_bytes(Path(file))
        conversations, self.bad = parse_lines(numbered_lines(data), conversation_from_json)
        if not conversations:
            msg = (
                f"{file} gives no conversation ({why_nothing(self.bad)}); write one JSON object "
                "with messages a line."
            )
            raise InputError(msg)
        self.name, self.sha256 = str(file), hashlib.sha256(data).hexdigest()
        self._conversations = conversations[:limit]
        self._rendering = rendering

    def settings(self) -> dict[str, Any]:
        """Return what decides which sequences there are."""
        return source_settings("conversations", self._rendering)

    def count(self, tokenizer: Any) -> int:
        """Return how many sequences there are."""
        return len(self._conversations)

    def jobs(self, tokenizer: Any) -> Iterator[Job | Skipped]:
        """Yield one sequence a conversation, rendered whole."""
        accept_tokenizer(tokenizer)
        self._rendering.accept(tokenizer)
        for conversation in self._conversations:
            try:
                part = render_conversation(conversation, tokenizer, self._rendering)
            except InputError as error:
                yield Skipped(conversation.id, str(error))
                continue
            yield Job(
                sequence_id=f"{conversation.id}#0",
                prompt_id=conversation.id,
                domain=conversation.domain,
                parts=(part,),
                max_new_tokens=0,
                is_given=True,
                prompt_end=_prompt_end(part),
                rendering=self._rendering,
            )


def _prompt_end(part: Rendered) -> int | None:
    """Return the position where the first assistant's message begins; None: none, or at 0."""
    spoken = zip(part.roles, part.is_template, strict=True)
    return (
        next((t for t, (role, own) in enumerate(spoken) if role == "assistant" and not own), 0)
        or None
    )
