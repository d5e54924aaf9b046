"""How long a sequence may be: hard where positions run out, soft where they were not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Embedding

from tracekit.model.decoder import decoder_of
from tracekit.spec import LENGTH_DEPENDENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.spec import RopeSpec

_MOST_SPARE_ROWS = 4
"""Rows that an embedding of positions may have before its first one: OPT has two."""


def read_positions(model: Any, ropes: dict[str, RopeSpec]) -> tuple[int | None, int | None]:
    """Return the most positions that a model can have, and the most it was trained on.

    Parameters
    ----------
    model
        A loaded model.
    ropes
        Its rotary embeddings.

    Returns
    -------
    tuple
        ``max_positions`` and ``trained_positions`` of ``ModelSpec``; at most one of them is given.
    """
    config = model.config.get_text_config(decoder=True)
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if any(rope.kind in LENGTH_DEPENDENT for rope in ropes.values()):
        lengths = [longest, *_original_lengths(config.rope_parameters)]
        return min(int(one) for one in lengths if one is not None), None
    if ropes:
        return None, longest
    # MPT builds its ALiBi biases for so many keys and no more.
    room: int | None = getattr(config, "max_seq_len", None)
    if room is not None:
        return room, None
    return (longest, None) if _has_learned_positions(model, longest) else (None, longest)


def _original_lengths(parameters: dict[str, Any]) -> Iterator[int | None]:
    """Yield the lengths up to which frequencies stay, of all kinds of layers."""
    yield parameters.get("original_max_position_embeddings")
    for nested in parameters.values():
        if isinstance(nested, dict):
            yield nested.get("original_max_position_embeddings")


def _has_learned_positions(model: Any, longest: int | None) -> bool:
    """Return whether an embedding besides that of tokens has a row a position."""
    if longest is None:
        return False
    tokens = model.get_input_embeddings()
    return any(
        0 <= module.num_embeddings - longest <= _MOST_SPARE_ROWS
        for module in decoder_of(model).modules()
        if isinstance(module, Embedding) and module is not tokens
    )
