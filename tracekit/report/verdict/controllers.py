"""What each controller of set sizes gains: over a fixed size, and by its timing alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracekit.measure.stats import Interval
from tracekit.report.verdict.schemes import COMPARED_SIZE, short_names
from tracekit.schema import OTHERS, OWN, SHUFFLED, VOCAB_RESULTS
from tracekit.simulate.controller_gains import FIXED, fixed_controller, gains
from tracekit.simulate.scheme_name import scheme_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracekit.report.load import Results

_MEASURE = "hit_argmax"
_COLUMNS = ["sequence_id", "fit", "size", "num_scored", _MEASURE]


@dataclass(frozen=True, kw_only=True)
class ControllerGain:
    """The share of most likely tokens covered by sizes that a controller sets, and by others.

    Parameters
    ----------
    name, controller
        Short name of the scheme, and canonical text of what sets its sizes.
    size
        Mean size, the same for all.
    fixed, others, own
        Shares covered by the size asked at every step, by sizes fitted on other prompts, and by
        sizes of the same mean over the steps themselves; all steps alike, None of none.
    over_fixed, timing
        ``own`` less ``fixed``, and less the same sizes at other steps, on the same sequences.
    """

    name: str
    controller: str
    size: int
    fixed: float | None
    others: float | None
    own: float | None
    over_fixed: Interval
    timing: Interval


def controller_gains(results: Results) -> Iterator[ControllerGain]:
    """Yield what each controller gains, a scheme after the other, ascending size."""
    rows, short = results.table(VOCAB_RESULTS), short_names(results)
    tried = rows.loc[rows["fit"] == OWN, ["estimator", "controller"]].drop_duplicates()
    for estimator, controller in tried.itertuples(index=False, name=None):
        of = rows[rows["estimator"] == estimator]
        own, fixed = (
            of.loc[of["controller"] == one, _COLUMNS].dropna().to_dict("records")
            for one in (controller, fixed_controller(controller))
        )
        text = scheme_name(estimator, controller)
        for told in gains(own, fixed, seed=results.run["seed"], measures=[_MEASURE]):
            yield ControllerGain(
                name=short.get(text, text),
                controller=controller,
                size=told["size"],
                **{fit: told[fit] for fit in (FIXED, OTHERS, OWN)},
                over_fixed=_less(told, FIXED),
                timing=_less(told, SHUFFLED),
            )


def timed_gains(results: Results) -> list[ControllerGain]:
    """Return the gains at the size nearest ``COMPARED_SIZE`` whose timing was measured, by name."""
    found = [one for one in controller_gains(results) if one.timing.n]
    sizes = sorted({one.size for one in found})
    nearest = min(sizes, key=lambda size: abs(size - COMPARED_SIZE), default=None)
    return sorted((one for one in found if one.size == nearest), key=lambda one: one.name)


def points(frac: float) -> str:
    """Return a difference of two shares in points, with its sign: ``+1.25``."""
    return f"{100 * frac:+.2f}"


def _less(told: Mapping[str, Any], baseline: str) -> Interval:
    ends = (told[f"{end}_{baseline}"] for end in ("low", "high", "n"))
    return Interval(told[f"own_minus_{baseline}"], *ends)
