"""Tokenizers and prompts that several tests of rendering use."""

from __future__ import annotations

import copy
from typing import Any

from tokenizers import processors

from tests import tiny
from tracekit.record.prompt import Message, Prompt

BOS, START, END = 0, 1, 2  # ids of <|endoftext|>, <|im_start|> and <|im_end|>


def said(*messages: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in messages)


def chat(*messages: tuple[str, str], **more: Any) -> Prompt:
    return Prompt(id="p", domain="d", messages=said(*messages), **more)


def with_template(template: str | None) -> Any:
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def with_bos(*, after: str = "") -> Any:
    """Return a tokenizer that puts <|endoftext|> before a text."""
    tokenizer = with_template(tiny.CHAT_TEMPLATE)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<|endoftext|> $A {after}".strip(),
        special_tokens=[("<|endoftext|>", BOS), ("<|im_end|>", END)],
    )
    return tokenizer
