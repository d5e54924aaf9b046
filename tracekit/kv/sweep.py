"""Rows between two decisions under several families at once, each with all its amounts.

Between decisions kept sets are fixed, so rows need not be read one by one. Exponentials of a head's
rows over all keys are computed once; each kept set is then a sum over some of them. Where the N
sets of a family are beginnings of one order (a policy that decides once ranks keys once), sums over
the segments of that order are added up: N outputs for one product with the values.

Exponentials are taken against the maximum of the full row. Where what is kept is so small beside it
that digits are lost, the rows are computed anew against their own maximum; where a set keeps
everything, the full output is taken as it is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from tracekit.kv import attend
from tracekit.kv.findings import Findings
from tracekit.kv.measures import Measures
from tracekit.kv.sets import Sets
from tracekit.kv.sums import RowSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.engine import Engine
    from tracekit.kv.reference import Reference
    from tracekit.kv.scorer import Scorer


def sweep(
    engines: Sequence[Engine], reference: Reference, decisions: Sequence[int]
) -> list[Measures[torch.Tensor]]:
    """Take engines that decide at the same rows through all of them.

    Parameters
    ----------
    engines
        One a family, with the rows before the first decision; attention must read what was written
        of all that is held.
    reference
        The recorded rows.
    decisions
        Tokens seen at each decision.

    Returns
    -------
    list of Measures
        One an engine, the same as reading the rows one by one.
    """
    parts: list[list[Measures[torch.Tensor]]] = [[] for _ in engines]
    first: dict[Scorer, torch.Tensor] = {}
    for engine in engines:
        scorer = engine.policy.scorer
        first[scorer] = first[scorer] if scorer in first else engine.score()
        engine.decide(first[scorer])
    for start, end in pairwise([*decisions, reference.num_rows]):
        if start > decisions[0]:
            for engine in engines:
                engine.decide()
        findings = _segment(engines, reference, start, end, decisions[0])
        for engine, found, part in zip(engines, findings, parts, strict=True):
            part.append(found.measures())
            if end < reference.num_rows:
                engine.absorb(*reference.rows(start, end), found.accumulated())
    return [
        Measures(*(torch.cat(blocks, dim=-1) for blocks in zip(*part, strict=True)))
        for part in parts
    ]


def _segment(
    engines: Sequence[Engine], reference: Reference, start: int, end: int, point: int
) -> list[Findings]:
    """Return what rows ``start`` .. ``end`` - 1 read after a decision."""
    layer, item = reference.layer, reference.key_LGTD.element_size()
    sets = [Sets(engine) for engine in engines]
    findings = [Findings(engine, reference, start, end, point) for engine in engines]
    for at in range(reference.num_layers):
        for first, last in attend.row_blocks(start, end, layer.group_size * end * item):
            for head in range(layer.num_kv_heads):
                rows = RowSums.of(reference, at, head, start, first, last)
                for one, found in zip(sets, findings, strict=True):
                    found.take(rows, one.read(rows, at, head), at, head)
    return findings
