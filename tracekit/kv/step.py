"""Rows after the first decision under one engine, read in order, block by block."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tracekit.kv.compare import compare
from tracekit.kv.measures import Measures
from tracekit.kv.reference import FullRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.engine import Engine
    from tracekit.kv.reference import Reference


def step(engine: Engine, reference: Reference, decisions: Sequence[int]) -> Measures[torch.Tensor]:
    """Take an engine through all rows, deciding where it is due, and measure them.

    Any policy can be read so; ``sweep`` is faster where rows read all that is held, as written.

    Parameters
    ----------
    engine
        With the rows before the first decision.
    reference
        The recorded rows.
    decisions
        Tokens seen at each decision.

    Returns
    -------
    Measures
        Of the rows from the first decision on.
    """
    point, due = decisions[0], set(decisions)
    parts: list[Measures[torch.Tensor]] = []
    for block in reference.blocks(point):
        full = reference.full(*block)
        stops = sorted({*block, *(seen for seen in due if block[0] < seen < block[1])})
        for start, end in pairwise(stops):
            if start in due:
                engine.decide()
            for output_NLHQD, outcome in engine.run(*reference.rows(start, end)):
                rows = slice(outcome.rows.start - block[0], outcome.rows.stop - block[0])
                same = FullRows(*(array[..., rows, :] for array in full))
                parts.append(compare(engine, output_NLHQD, outcome, same, reference, point))
    return Measures(*(torch.cat(blocks, dim=-1) for blocks in zip(*parts, strict=True)))
