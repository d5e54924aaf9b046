"""Rows of ``head_times``: measured times of candidate sets, and what a free head would bring."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tracekit.measure.ceiling import ceiling, head_share
from tracekit.measure.head_time import GatherTime, time_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.head import Head
    from tracekit.spec import ModelSpec


def head_times(spec: ModelSpec, head: Head, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the columns of ``schema.HEAD_TIMES`` for a head on this machine.

    Parameters
    ----------
    spec
        The model whose head it is.
    head
        The head.
    sizes
        Candidate-set sizes, each at least 1; those above V count as V.

    Returns
    -------
    dict
        A list for each column that differs by row (batches 1 and 8, sizes within), one value for
        the others. Times are those of this run; ``head_share`` and ``ceiling_free`` are None where
        the bytes of the weights are not known.

    Raises
    ------
    UsageError
        As ``time_gather`` and ``head_share``.
    """
    times = [asdict(one) for one in time_gather(head, sizes)]
    share = head_share(head.num_bytes, _step_bytes(spec, head))
    columns: dict[str, Any] = {
        field.name: [row[field.name] for row in times] for field in fields(GatherTime)
    }
    bound = None if share is None else ceiling(share)
    return columns | {"head_share": share, "ceiling_free": bound}


def _step_bytes(spec: ModelSpec, head: Head) -> int | None:
    """Return the weight bytes that a step reads: of an input embedding that is no head, one row.

    The embedding is taken to be as wide as the head; where it is narrower the head's share comes
    out larger, as an upper bound may.
    """
    if spec.num_weight_bytes is None or spec.num_embeddings is None or spec.head.is_tied:
        return spec.num_weight_bytes
    row_bytes = spec.head.hidden_size * head.weight_VE.element_size()
    return spec.num_weight_bytes - (spec.num_embeddings - 1) * row_bytes
