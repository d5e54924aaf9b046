"""Which estimators have a name and a colour in the figures of the vocabulary, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.report.figures.canvas import styles
from tracekit.report.figures.cost_curve import members, priced
from tracekit.report.formats import count
from tracekit.report.verdict.schemes import REFERENCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.figures.canvas import Style
    from tracekit.report.load import Point, Results

MOST_METHODS = 8
"""Methods that have a name: more lines cannot be told apart."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Estimators that are told apart, at which size they were chosen, and the others.

    Parameters
    ----------
    sizes
        Candidates asked for, ascending.
    size
        The middle one of them: at this one estimators are compared.
    methods
        Causal estimators that read less than the full head and are named, most covered first.
    looks
        Style of each method and reference.
    dear, bounds, rest
        Drawn in grey: read as much as the full head or more; no decoder can prune so; cover less.
    """

    sizes: tuple[int, ...]
    size: int
    methods: tuple[str, ...]
    looks: dict[str, Style]
    dear: tuple[str, ...]
    bounds: tuple[str, ...]
    rest: tuple[str, ...]

    @property
    def rule(self) -> str:
        """How the named ones were chosen, and what is grey."""
        text = (
            f"Named in the figures: of the estimators that read less than the full head at "
            f"{count(self.size)} candidates, those that no other beats in both coverage and bytes, "
            f"then those that cover most, {MOST_METHODS} at most; beside them the oracle, a bound "
            "that knows the logits, and random sets."
        )
        greys = {
            "read as much as the full head or more": self.dear,
            "bounds that no decoder reaches": self.bounds,
            "cover less, or not tried at this size": self.rest,
        }
        told = [f"{', '.join(names)} ({why})" for why, names in greys.items() if names]
        return f"{text} Grey: {'; '.join(told)}." if told else text


def named(results: Results) -> Named:
    """Return the estimators that have a name in every figure of the vocabulary."""
    curves = results.curves("vocab", "hit_argmax")
    sizes = tuple(sorted({int(point.x) for curve in curves.values() for point in curve}))
    size = sizes[len(sizes) // 2]
    there = {
        name: point
        for name, curve in priced(results).items()
        if name not in REFERENCES and (point := asked(curve, size)) is not None
    }
    dear = {name for name, point in there.items() if point.causal and point.x >= 1}
    cheap = {name: point for name, point in there.items() if point.causal and name not in dear}
    leads = {point.family for point in members(cheap.values())}

    def worth(name: str) -> tuple[float, str]:
        return -cheap[name].mean, name

    wanted = sorted(cheap, key=lambda name: (name not in leads, *worth(name)))
    chosen = sorted(wanted[:MOST_METHODS], key=worth)
    others = curves.keys() - set(REFERENCES) - set(chosen) - dear
    bounds = {name for name in others if not curves[name][0].causal}
    return Named(
        sizes=sizes,
        size=size,
        methods=tuple(chosen),
        looks=styles([*chosen, *(name for name in REFERENCES if name in curves)]),
        dear=tuple(sorted(dear)),
        bounds=tuple(sorted(bounds)),
        rest=tuple(sorted(others - bounds)),
    )


def asked(curve: Sequence[Point], size: int) -> Point | None:
    """Return the point of a curve at one size asked for, if it has one."""
    return next((point for point in curve if point.target == size), None)
