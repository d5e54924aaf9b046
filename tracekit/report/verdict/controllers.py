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
    from collections.abc import Iterable, Iterator, Mapping

    import pandas as pd

    from tracekit.report.load import Results

_MEASURE = "hit_argmax"
_ORDERED = ("hit_argmax", "set_size_mean", "neg_log_mass_nats")
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
    is_varied
        Whether its sizes differ between steps, as far as their order changes any hit or mean size:
        sizes that never differ are no test of what sets them.
    """

    name: str
    controller: str
    size: int
    fixed: float | None
    others: float | None
    own: float | None
    over_fixed: Interval
    timing: Interval
    is_varied: bool


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
                is_varied=_is_varied(of, controller, told["size"]),
            )


def timed_gains(results: Results) -> list[ControllerGain]:
    """Return the gains at the size nearest ``COMPARED_SIZE`` whose timing was measured, by name."""
    return _at_size(one for one in controller_gains(results) if one.timing.n)


def fixed_gains(results: Results) -> list[ControllerGain]:
    """Return the gains at the size nearest ``COMPARED_SIZE`` held against fixed sizes, by name."""
    return _at_size(one for one in controller_gains(results) if one.over_fixed.n)


def _at_size(gains: Iterable[ControllerGain]) -> list[ControllerGain]:
    found = list(gains)
    sizes = sorted({one.size for one in found})
    nearest = min(sizes, key=lambda size: abs(size - COMPARED_SIZE), default=None)
    return sorted((one for one in found if one.size == nearest), key=lambda one: one.name)


def points(frac: float) -> str:
    """Return a difference of two shares in points, with its sign: ``+1.25``."""
    return f"{100 * frac:+.2f}"


def _is_varied(rows: pd.DataFrame, controller: str, size: int) -> bool:
    """Return whether the same sizes at other steps give anything else, in any sequence."""
    of = rows[(rows["controller"] == controller) & (rows["size"] == size)]
    measured = of.set_index("sequence_id").reindex(columns=[*_ORDERED]).astype(float)
    own, shuffled = (measured[(of["fit"] == fit).to_numpy()] for fit in (OWN, SHUFFLED))
    common = own.index.intersection(shuffled.index)
    return not own.loc[common].equals(shuffled.loc[common])


def _less(told: Mapping[str, Any], baseline: str) -> Interval:
    ends = (told[f"{end}_{baseline}"] for end in ("low", "high", "n"))
    return Interval(told[f"own_minus_{baseline}"], *ends)
