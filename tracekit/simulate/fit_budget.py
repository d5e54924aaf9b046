"""A budget over layers, fitted from what pruning each of them alone does to the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.errors import UsageError
from tracekit.kv.amounts import Frac
from tracekit.kv.budgets.heads_file import HeadsFile
from tracekit.kv.parse import parse
from tracekit.trace.layout import write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.kv.budget import Cache
    from tracekit.kv.policy import Policy

ADDITIVE = (
    "fitted as if the KL of pruning all layers were the sum of the KL of pruning each alone, from "
    "convex curves between the measured fractions"
)
"""What a fit takes for granted."""

Curve = tuple[tuple[float, float], ...]
"""Points (kept fraction, KL in nats) of a layer, fractions rising, the last one 1 at KL 0."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A budget over layers for one policy and one total.

    Parameters
    ----------
    policy
        The policy that keeps the total, uniformly.
    kept_frac_by_layer
        Fraction of the tokens seen that each layer keeps.
    kl_nats, uniform_kl_nats
        Sum over layers that the curves give for it, and for the uniform budget.
    num_sequences
        On which the curves were measured.
    """

    policy: Policy
    kept_frac_by_layer: dict[int, float]
    kl_nats: float
    uniform_kl_nats: float
    num_sequences: int


def fit_budget(
    rows: pd.DataFrame, cache: Cache, family: str | None = None, *, kept_frac: float
) -> Fit:
    """Return the budget over layers that makes the sum of their KL least, of uniform's bytes.

    The KL of each layer over its kept fraction is taken from its lower convex hull, piecewise
    linear, to 0 at 1. Of convex curves giving the next bytes to the layer that gains most by them
    is the best there is. That the layers' KL add up is an assumption: it leaves out what their
    errors do to each other, so a gain counts only if it is measured with all layers pruned. No
    layer is given less than the smallest fraction measured. A sliding layer is taken to hold as
    many entries as a full one; the allotment gives others what it cannot hold.

    Parameters
    ----------
    rows
        Of ``schema.LAYER_RESULTS``: whole layers under one policy at two fractions or more.
    cache
        The layers.
    family
        Which policy; None: the only one that was measured at several fractions.
    kept_frac
        Fraction that the uniform budget keeps, from the smallest measured to 1.

    Raises
    ------
    UsageError
        If no such policy was measured, in each layer, or ``kept_frac`` is out of range.
    """
    name, policies = _family(rows, family)
    fractions = sorted(policies)
    if not fractions[0] <= kept_frac <= 1:
        msg = f"a budget of {kept_frac:g} cannot be fitted: measured from {fractions[0]:g} to 1."
        raise UsageError(msg)
    frac_of = {policy.text: frac for frac, policy in policies.items()}
    used = rows[rows["rule"].isin(list(frac_of)) & (rows["kv_head"] == schema.ALL)]
    curves = _curves(
        used.assign(frac=used["rule"].astype(str).map(frac_of)), cache, fractions, name
    )
    sizes = zip(cache.layers, cache.entry_bytes_L, strict=True)
    bytes_by_layer = {layer.index: layer.num_kv_heads * size for layer, size in sizes}
    given = allocate(curves, bytes_by_layer, kept_frac)
    return Fit(
        policy=replace(policies[fractions[0]], kept=Frac(kept_frac)),
        kept_frac_by_layer=given,
        kl_nats=sum(at(curves[layer], frac) for layer, frac in given.items()),
        uniform_kl_nats=sum(at(curve, kept_frac) for curve in curves.values()),
        num_sequences=int(used["sequence_id"].nunique()),
    )


def _curves(
    rows: pd.DataFrame, cache: Cache, fractions: Sequence[float], name: str
) -> dict[int, Curve]:
    """Return the convex curve of each layer, of means over sequences at all fractions."""
    means = rows.groupby(["layer", "frac"])["kl_nats"].mean()
    curves = {}
    for layer in (one.index for one in cache.layers):
        if not all(np.isfinite(means.get((layer, frac), np.nan)) for frac in fractions):
            msg = f"layer {layer} has no KL under {name} at each of {fractions}: sweep all layers."
            raise UsageError(msg)
        points = [(frac, float(means[layer, frac])) for frac in fractions if frac < 1]
        curves[layer] = hull([*points, (1.0, 0.0)])
    return curves


def _family(rows: pd.DataFrame, family: str | None) -> tuple[str, dict[float, Policy]]:
    """Return a family that was measured at several fractions, and its policies by fraction."""
    found: dict[str, dict[float, Policy]] = {}
    for text in rows["rule"].astype(str).unique():
        policy = None if text.startswith("rows:") else parse(text)
        if policy is not None and isinstance(policy.kept, Frac) and policy.scorer.evicts:
            found.setdefault(policy.family, {})[policy.kept.amount] = policy
    several = {name: some for name, some in found.items() if len(some) > 1}
    wanted = list(several) if family is None else [name for name in several if name == family]
    if len(wanted) != 1:
        msg = (
            f"a budget is fitted from one policy at two kept fractions or more, not from "
            f"{', '.join(wanted) or 'none'}: name one such as snapkv, and sweep it at kept=0.1 "
            "and kept=0.5, say."
        )
        raise UsageError(msg)
    return wanted[0], several[wanted[0]]


def hull(points: Iterable[tuple[float, float]]) -> Curve:
    """Return the lower convex hull of points, from left to right."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(kept) > 1:
            (x0, y0), (x1, y1) = kept[-2:]
            if (x1 - x0) * (y - y0) > (y1 - y0) * (x - x0):
                break
            kept.pop()
        kept.append((x, y))
    return tuple(kept)


def at(curve: Curve, frac: float) -> float:
    """Return the KL of a curve at a kept fraction."""
    x, y = zip(*curve, strict=True)
    return float(np.interp(frac, x, y))


def allocate(
    curves: Mapping[int, Curve], bytes_by_layer: Mapping[int, int], kept_frac: float
) -> dict[int, float]:
    """Return the fractions of least summed KL that weigh as much as ``kept_frac`` in all layers.

    Parameters
    ----------
    curves
        Convex, by layer; each begins at the least fraction that its layer may keep.
    bytes_by_layer
        Bytes of a token in each layer.
    kept_frac
        Of a uniform budget, not below where the curves begin.
    """
    given = {layer: curve[0][0] for layer, curve in curves.items()}
    left = sum((kept_frac - given[layer]) * size for layer, size in bytes_by_layer.items())
    steps = sorted(
        ((y1 - y0) / (x1 - x0) / bytes_by_layer[layer], layer, x1 - x0)
        for layer, curve in curves.items()
        for (x0, y0), (x1, y1) in pairwise(curve)
    )
    # On a convex curve the slopes rise, so each layer's steps come in their order.
    for _, layer, width in steps:
        taken = min(width, max(0.0, left) / bytes_by_layer[layer])
        given[layer] += taken
        left -= taken * bytes_by_layer[layer]
    return given


def refuse_name(file: Path) -> None:
    """Raise if a budget cannot be written to a file, or a policy's text not name it."""
    if file.suffix != ".json" or set(str(file)) & set(",+"):
        msg = f"{file} is no name for a budget: let it end in .json, without a comma or a plus."
        raise UsageError(msg)
    if not file.parent.is_dir():
        msg = f"{file} cannot be written: {file.parent} is no folder."
        raise UsageError(msg)


def write_budget(fit: Fit, file: Path, cache: Cache, about: Mapping[str, Any]) -> Policy:
    """Write a head file of a fit, and where it comes from beside it; return what reads it.

    Parameters
    ----------
    fit
        The budget.
    file
        ``NAME.json``; ``NAME.about.json`` says what it was made of, and its SHA-256.
    cache
        The layers.
    about
        What else is to be said of its origin.

    Raises
    ------
    UsageError
        If the file is not named so, or its path cannot stand in a policy's text.
    """
    refuse_name(file)
    reads = HeadsFile(file=str(file), head_floor=0.0)
    policy = replace(fit.policy, layers=reads)
    share_of = fit.kept_frac_by_layer
    write_json(
        file, {str(one.index): [share_of[one.index]] * one.num_kv_heads for one in cache.layers}
    )
    origin = {
        "policy": policy.text,
        "fitted_with": fit.policy.text,
        "how": ADDITIVE,
        "kl_nats": fit.kl_nats,
        "uniform_kl_nats": fit.uniform_kl_nats,
        "num_sequences": fit.num_sequences,
        "sha256": reads.content,
    }
    write_json(file.with_suffix(".about.json"), origin | dict(about))
    return policy
