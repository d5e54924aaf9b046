"""What a replay must know about a model, and nothing else: shapes, scales, caps, windows, sinks.

Specs are read from a loaded model by ``model/read_spec.py`` (by watching a short forward pass, not
by believing the config) and travel in ``trace.json``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

LayerKind = Literal["full", "sliding", "linear", "shared", "untapped"]

RopeLayout = Literal["halves", "neighbours"]

UNREAD_ROPE = "unread"
"""Name and kind of a rotary embedding that turns keys in a way that no module of the model explains."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies change once a sequence is longer than their own."""


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of one group of layers.

    Parameters
    ----------
    kind
        transformers' ``rope_type``: ``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope``...
    theta
        Base of the frequencies.
    inv_freq
        Inverse frequencies (radians a token), as used for short sequences; its length is half the
        rotated part of a head.
    attention_scaling
        Factor on cos and sin (1.0 unless YaRN or LongRoPE).
    layout
        Which numbers of a head turn together, F being the length of ``inv_freq``: ``halves`` are
        (f, F + f), ``neighbours`` (2 f, 2 f + 1), one and the same where F is 1. None where it is
        not known: no layer uses it, its layers do not agree, or an older version recorded it.
    """

    kind: str
    theta: float
    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    layout: RopeLayout | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer, as the attention function and the cache show it.

    Parameters
    ----------
    index
        Layer number, 0 at the input.
    kind
        ``full`` and ``sliding`` hold keys of their own; ``shared`` reads those of ``owner``;
        ``linear`` has a recurrent state and no keys; ``untapped`` has attention that cannot be seen.
    num_heads, num_kv_heads
        Query heads H and key-value heads G; 0 where there is no attention.
    head_dim, value_dim
        Size of a key and of a value, in numbers.
    scale
        Factor on the product of query and key, before soft-cap and softmax.
    window
        Tokens that a query may see in a sliding layer, its own included; None in others.
    softcap
        Soft-cap of the attention logits; None where there is none.
    sinks
        Learned sink logits, one a query head (gpt-oss); None where there are none.
    alibi
        Slope of each query head (BLOOM, MPT): slope times the key's position is added to the logits
        after scale and soft-cap. Softmax cannot tell it from a bias by distance. None elsewhere.
    owner
        Layer whose keys a ``shared`` layer reads.
    rope
        Name of the rotary embedding in ``ModelSpec.ropes``; None for layers without.
    refusal
        Why the attention of this layer cannot be replayed (the self-check's words); None if it can.
    """

    index: int
    kind: LayerKind
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    alibi: tuple[float, ...] | None = None
    owner: int | None = None
    rope: str | None = None
    refusal: str | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head; query head h reads KV head h // group_size."""
        return self.num_heads // self.num_kv_heads

    @property
    def holds_keys(self) -> bool:
        """Whether this layer has cache entries of its own."""
        return self.kind in ("full", "sliding")

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token adds to this layer's cache."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) if self.holds_keys else 0

    def entries(self, num_tokens: int) -> int:
        """Return the cache entries a head holds after ``num_tokens`` tokens."""
        if not self.holds_keys:
            return 0
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The language-model head: logits = softcap(scale * (W h + b)).

    Parameters
    ----------
    num_rows
        Rows of W: the width of the logits, padded rows included.
    hidden_size
        Size of the final hidden state.
    has_bias
        Whether there is a bias b.
    scale
        Factor on the product (Cohere, Granite); 1.0 elsewhere.
    softcap
        Final soft-cap (Gemma 2); None elsewhere.
    is_tied
        Whether W is the input embedding.
    """

    num_rows: int
    hidden_size: int
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    is_tied: bool = False


NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """The norm between the last layer and the head: y = (offset + w) * x / rms(x) + b.

    Parameters
    ----------
    kind
        ``rms`` divides by the root mean square; ``layer`` subtracts the mean first.
    eps
        Added to the mean square under the root.
    weight_offset
        0.0, or 1.0 where the weight is stored less one (Gemma).
    has_weight, has_bias
        Whether there are w and b.
    rounds_first
        Whether x / rms(x) is rounded to the model's type before the weight multiplies it (Llama),
        not after (Gemma); one and the same in float32.
    """

    kind: NormKind
    eps: float
    weight_offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False
    rounds_first: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as the recorder and the engines see it.

    Parameters
    ----------
    name
        What the user asked for: a hub id, a folder, a file, or a built-in name.
    revision
        Commit or content hash of the weights' source; None for a local folder.
    model_type
        transformers' ``model_type``.
    fingerprint
        SHA-256 over config and weights; replay refuses a model with another one.
    dtype
        Type in which the model computes: ``float32``, ``bfloat16``, ``float16``.
    layers
        All decoder layers, in order.
    head
        The language-model head.
    ropes
        Rotary embeddings by name.
    num_tokens
        Entries of the tokenizer (``head.num_rows`` may be larger: padding).
    max_positions
        Longest sequence that the model can read as one function of tokens and positions: rows of
        its learned position embedding, or the length from which its rotary frequencies change; None
        if unbounded.
    attention
        Attention implementation in use: ``sdpa``, ``eager``...
    trained_positions
        Longest sequence that it was made for, where longer ones run all the same; None if unknown.
    num_embeddings
        Rows of the input embedding: token ids must be below.
    norm
        The norm before the head; None if it is not understood, or an older version recorded it.
    num_parameters
        Numbers in all weights of the model, those that are tied counted once; None if unknown.
    num_weight_bytes
        Bytes of these weights as they were loaded; None if unknown.
    """

    name: str
    revision: str | None
    model_type: str
    fingerprint: str
    dtype: str
    layers: tuple[LayerSpec, ...]
    head: HeadSpec
    ropes: dict[str, RopeSpec]
    num_tokens: int
    max_positions: int | None
    attention: str
    trained_positions: int | None = None
    num_embeddings: int | None = None
    norm: NormSpec | None = None
    num_parameters: int | None = None
    num_weight_bytes: int | None = None

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token adds to the whole cache, windows aside."""
        return sum(layer.numbers_per_token for layer in self.layers)

    def kv_bytes(self, num_tokens: int, *, bytes_per_number: int = 2) -> int:
        """Return the bytes of the full cache after ``num_tokens`` tokens (sliding layers: min)."""
        return bytes_per_number * sum(
            layer.entries(num_tokens) * layer.numbers_per_token for layer in self.layers
        )

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary for ``trace.json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        """Build the spec back from ``to_json``; specs of older traces are read as well."""
        ropes = {
            name: RopeSpec(**{**rope, "inv_freq": tuple(rope["inv_freq"])})
            for name, rope in data["ropes"].items()
        }
        norm = data.get("norm")
        spec = cls(
            **{
                **data,
                "layers": tuple(_layer_from_json(layer) for layer in data["layers"]),
                "ropes": ropes,
                "head": HeadSpec(**data["head"]),
                "norm": None if norm is None else NormSpec(**norm),
            }
        )
        return spec if "trained_positions" in data else _with_split_positions(spec)


def _layer_from_json(data: dict[str, Any]) -> LayerSpec:
    """Return a layer; JSON has lists where the spec has tuples."""
    lists = {name: tuple(data[name]) for name in ("sinks", "alibi") if data.get(name) is not None}
    return LayerSpec(**{**data, **lists})


def _with_split_positions(spec: ModelSpec) -> ModelSpec:
    """Return a spec of the time when one field held both limits, and the embedding was not read."""
    is_soft = bool(spec.ropes) and all(
        rope.kind not in LENGTH_DEPENDENT for rope in spec.ropes.values()
    )
    return replace(
        spec,
        max_positions=None if is_soft else spec.max_positions,
        trained_positions=spec.max_positions if is_soft else None,
        num_embeddings=spec.head.num_rows,
    )
