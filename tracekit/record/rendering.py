"""How messages and texts become what the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracekit.errors import InputError, UsageError
from tracekit.registry import unknown

FORMATS = ("auto", "chat", "raw")
SPECIAL_TOKENS = ("literal", "parse")


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How messages and texts become what the model reads.

    Parameters
    ----------
    format
        ``auto``: messages through the tokenizer's chat template, texts as they are. ``chat``: all
        through the template, a text as one user message. ``raw``: no template; the contents of
        messages are joined by blank lines, and an answer follows the user's words at once.
    special_tokens
        ``literal``: the name of a special token in a text or a message is plain words. ``parse``:
        it is that token.

    Raises
    ------
    UsageError
        If one of them is unknown.
    """

    format: str = "auto"
    special_tokens: str = "literal"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        for kind, name, known in (
            ("format", self.format, FORMATS),
            ("special_tokens", self.special_tokens, SPECIAL_TOKENS),
        ):
            if name not in known:
                raise UsageError(unknown(kind, name, list(known)))

    @property
    def is_literal(self) -> bool:
        """Whether names of special tokens are plain words."""
        return self.special_tokens == "literal"

    def accept(self, tokenizer: Any) -> None:
        """Refuse a tokenizer that can render nothing in this way.

        Raises
        ------
        InputError
            If all is to go through a chat template and there is none.
        """
        if self.format == "chat" and not tokenizer.chat_template:
            msg = "--chat needs a chat template, and the tokenizer has none; use --raw."
            raise InputError(msg)


DEFAULT_RENDERING = Rendering()
"""Where nobody says otherwise."""
