"""What to record and how."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tracekit.errors import UsageError
from tracekit.record.generate import Sampler
from tracekit.registry import unknown
from tracekit.trace import layout

DEFAULT_NEW_TOKENS = 128
"""New tokens where neither the prompt nor the caller says how many."""

STORE_DTYPES = {"native": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types in which queries, keys and values can be stored; native is bit for bit."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """What to record and how.

    Parameters
    ----------
    capture
        ``steps`` (numbers only), ``hidden`` (final hidden states and attention statistics) or
        ``qkv`` (also queries, keys and values: exact KV replay).
    max_new_tokens
        New tokens an answer; None: what each prompt asks for, else 128.
    limit
        Record the first so many prompts only.
    sampler
        How tokens are chosen.
    seed
        Of the sampler; each sequence has its own, made of this one and its id.
    dtype_store
        ``native`` keeps queries, keys and values bit for bit; ``float16`` halves a float32 model's
        and moves the kept set of some heads.
    head
        ``store`` the language-model head, so that vocabulary replay needs no model, or ``omit`` it.
    overwrite
        Delete a trace that is there.
    """

    capture: str = "qkv"
    max_new_tokens: int | None = None
    limit: int | None = None
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 0
    dtype_store: str = "native"
    head: str = "store"
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown names at once."""
        for kind, name, known in (
            ("capture", self.capture, list(layout.CAPTURES)),
            ("dtype_store", self.dtype_store, list(STORE_DTYPES)),
            ("head", self.head, ["store", "omit"]),
        ):
            if name not in known:
                raise UsageError(unknown(kind, name, known))
        if any(count is not None and count < 1 for count in (self.max_new_tokens, self.limit)):
            msg = "max_new_tokens and limit must be at least 1."
            raise UsageError(msg)
