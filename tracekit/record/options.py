"""What to record and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tracekit.errors import UsageError
from tracekit.model.norm import refuse_residuals
from tracekit.record.attention_stats import Wanted
from tracekit.record.layer_choice import Choice, chosen_layers, decoder_layers
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.sampler import Sampler
from tracekit.registry import unknown
from tracekit.trace import layout

if TYPE_CHECKING:
    from tracekit.record.job import Job
    from tracekit.spec import ModelSpec

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
        ``steps`` (numbers only), ``hidden`` (final hidden states and attention statistics), ``qkv``
        (also queries, keys and values: exact KV replay) or ``influence`` (also probes, from which
        the harm of an eviction to the model's output is foretold).
    max_new_tokens
        New tokens an answer, 0 for the prompt alone; None: what each prompt asks for, else 128.
    batch_size
        Sequences that run together, padded on the left; prompts of several turns run alone.
    prefill_chunk
        Most tokens of a prompt that go through the model at once.
    sampler
        How tokens are chosen.
    seed
        Of the sampler; each sequence has its own, made of this one and its id.
    dtype_store
        ``native`` keeps queries, keys, values and hidden states of layers bit for bit; ``float16``
        halves a float32 model's and moves the kept set of some heads.
    maps
        Layers whose attention is kept whole, negative ones counted from the top, or ``all``.
    attention_topk
        Largest entries of each attention row to keep with their keys.
    hidden_layers
        Decoder layers whose outgoing hidden states are kept, for logit lenses: negative ones counted
        from the top, or ``all``.
    head
        ``store`` the language-model head, so that vocabulary replay needs no model, or ``omit`` it.
    store_oproj
        Store the output projection of each layer, so that errors of attention can be measured where
        they enter the model.
    probes
        Which influence probes are recorded.
    overwrite
        Delete a trace that is there.
    """

    capture: str = "qkv"
    max_new_tokens: int | None = None
    batch_size: int = 1
    prefill_chunk: int = 2048
    sampler: Sampler = field(default_factory=Sampler)
    seed: int = 0
    dtype_store: str = "native"
    maps: Choice = ()
    attention_topk: int = 0
    hidden_layers: Choice = ()
    head: str = "store"
    store_oproj: bool = False
    probes: ProbeOptions = field(default_factory=ProbeOptions)
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible numbers at once."""
        for kind, name, known in (
            ("capture", self.capture, list(layout.CAPTURES)),
            ("dtype_store", self.dtype_store, list(STORE_DTYPES)),
            ("head", self.head, ["store", "omit"]),
        ):
            if name not in known:
                raise UsageError(unknown(kind, name, known))
        for kind, count, least in (
            ("max_new_tokens", self.max_new_tokens, 0),
            ("batch_size", self.batch_size, 1),
            ("prefill_chunk", self.prefill_chunk, 1),
            ("attention_topk", self.attention_topk, 0),
        ):
            if count is not None and count < least:
                msg = f"{kind} must be at least {least}, not {count}."
                raise UsageError(msg)
        self._refuse_idle()

    def _refuse_idle(self) -> None:
        """Refuse what the capture level has no use for."""
        if self.capture == "steps" and (self.maps or self.attention_topk):
            msg = "capture steps has no attention: maps and attention_topk need hidden or qkv."
            raise UsageError(msg)
        if self.capture == "steps" and self.hidden_layers:
            msg = "capture steps stores no tensors: hidden_layers needs capture hidden or more."
            raise UsageError(msg)
        if self.store_oproj and not layout.holds(self.capture, "qkv"):
            msg = (
                f"output projections are of use beside queries, keys and values only: store_oproj "
                f"needs capture qkv, not {self.capture}."
            )
            raise UsageError(msg)
        if self.probes != ProbeOptions() and self.capture != "influence":
            msg = f"probes need capture influence, not {self.capture}."
            raise UsageError(msg)

    def wanted(self, spec: ModelSpec) -> Wanted:
        """Return what is kept of attention rows of a model.

        Raises
        ------
        UsageError
            If the model has no such layer, or its attention cannot be seen.
        """
        return Wanted(self.attention_topk, chosen_layers("maps", self.maps, spec))

    def residual_layers(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the layers of a model whose outgoing hidden states are kept, in order.

        Raises
        ------
        UsageError
            If the model has no such layer.
        ModelError
            If its final norm is not understood: no logits could be derived from them.
        """
        layers = decoder_layers("hidden_layers", self.hidden_layers, spec)
        if layers:
            refuse_residuals(spec)
        return layers


def new_tokens(job: Job, options: RecordOptions) -> int:
    """Return the most tokens of each answer of a job; 0 where nothing is generated."""
    if job.is_given:
        return 0
    wanted = (options.max_new_tokens, job.max_new_tokens, DEFAULT_NEW_TOKENS)
    return next(count for count in wanted if count is not None)
