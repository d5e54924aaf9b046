"""KL of the next-token distributions, foretold from influence probes. Numpy alone.

A probe draws a label from the model's own distribution at each row and takes the gradient g of the
sum of -ln p(label). A small change of attention outputs moves row t by z_t = sum of <g_t, change>
over layers and heads. Labels are independent of each other and their gradients average to zero, so
that (sum of z)^2 / 2 has the KL of the changed model as its mean, to second order (Gauss-Newton);
products of z of far rows add noise alone, and are left out by squaring block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_ROWS = 16
"""Rows whose effects are added up before they are squared."""


@dataclass(frozen=True, eq=False)
class Foretold:
    """What probes foretell.

    Parameters
    ----------
    kl_nats
        KL of full and pruned predictions a scored row, mean over probes; NaN without probes.
    se_nats
        Its standard error over probes; NaN for fewer than two.
    parts_nats
        Contributions to ``kl_nats`` by source, float64, shaped like the sources; they add up to it
        and may be negative. NaN for sources without probes.
    """

    kl_nats: float
    se_nats: float
    parts_nats: tuple[np.ndarray, ...]


def block_sums(effect_XPR: np.ndarray, *, block: int = BLOCK_ROWS, offset: int = 0) -> np.ndarray:
    """Return effects summed over blocks of rows, float64 [..., P, B].

    Parameters
    ----------
    effect_XPR
        Gradient times change of output, rows last, at least one; any axes before.
    block
        Rows of a block, at least 1.
    offset
        Rows between the eviction point, from which blocks are counted, and the first of these.
    """
    starts = np.arange(-(offset % block), effect_XPR.shape[-1], block).clip(min=0)
    sums_XPB: np.ndarray = np.add.reduceat(effect_XPR, starts, axis=-1, dtype=np.float64)
    return sums_XPB


def foretell(sums: Sequence[np.ndarray], num_scored: int) -> Foretold:
    """Return the KL that probes foretell, and what contributes how much.

    Estimator: 1 / (2 S) * mean over P probes of the sum over B blocks of (sum over sources)^2; a
    source's part is the same with its own sum in place of one of the two factors.

    Parameters
    ----------
    sums
        What ``block_sums`` gives, of sources of change (heads of layers): [..., P, B] each, the
        same B; P = 0 for sources without probes, which add nothing.
    num_scored
        S, scored rows.
    """
    probed = [sums_XPB for sums_XPB in sums if sums_XPB.shape[-2]]
    if not probed:
        return Foretold(np.nan, np.nan, tuple(_no_parts(sums_XPB) for sums_XPB in sums))
    total_PB = sum(sums_XPB.reshape(-1, *sums_XPB.shape[-2:]).sum(0) for sums_XPB in probed)
    kl_P = np.square(total_PB).sum(-1) / (2 * num_scored)
    num_probes = len(kl_P)
    spread = kl_P.std(ddof=1) / np.sqrt(num_probes) if num_probes > 1 else np.nan
    factor_PB = total_PB / (2 * num_scored * num_probes)
    parts = (
        np.einsum("...pb,pb->...", sums_XPB, factor_PB)
        if sums_XPB.shape[-2]
        else _no_parts(sums_XPB)
        for sums_XPB in sums
    )
    return Foretold(float(kl_P.mean()), float(spread), tuple(parts))


def _no_parts(sums_XPB: np.ndarray) -> np.ndarray:
    return np.full(sums_XPB.shape[:-2], np.nan)
