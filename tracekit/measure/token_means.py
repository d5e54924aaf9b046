"""The statistics of steps that are functions of means, in the order of llama.cpp's perplexity tool.

Numpy alone. Each names its value, given the means of the columns, and its slope: one number a step,
whose standard error is that of the value to first order. These are llama.cpp's error formulas:
PPL * SE, covariances paired, 0.5 / rms * SE, sqrt(p (1 - p) / (n - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tracekit.measure.token_table import Means

Array = np.ndarray

_ROUNDING = 1e-12
"""Share of its mean square below which a variance is none."""


@dataclass(frozen=True)
class MeanStatistic:
    """One statistic.

    Parameters
    ----------
    name, unit
        Its name; nats, or '' where there is none.
    value
        From means of columns to the statistic; means may be arrays, one number a resample.
    slope
        From columns [N] and their means to one number a step; None where there is no error.
    """

    name: str
    unit: str
    value: Callable[[Means], Array]
    slope: Callable[[Mapping[str, Array], Means], Array] | None


def mean_of(name: str, unit: str, column: str) -> MeanStatistic:
    """Return the statistic that is the mean of a column."""
    return MeanStatistic(name, unit, lambda m: m[column], lambda x, _: x[column])


def _ppl(run: str) -> MeanStatistic:
    column = f"nll_{run}"
    return MeanStatistic(
        f"ppl_{run}", "", lambda m: np.exp(m[column]), lambda x, m: np.exp(m[column]) * x[column]
    )


def _correlation(m: Means) -> Array:
    """Return Pearson's correlation of the surprisals."""
    covariance = m["cross"] - m["full_c"] * m["pruned_c"]
    full, pruned = (m[f"{run}_sq"] - m[f"{run}_c"] ** 2 for run in ("full", "pruned"))
    # What is left of equal surprisals is rounding.
    varies = (full > _ROUNDING * m["full_sq"]) & (pruned > _ROUNDING * m["pruned_sq"])
    spread: Array = np.sqrt(np.where(varies, full * pruned, np.nan))
    correlation: Array = np.clip(covariance / spread, -1, 1)
    return correlation


def _ln_change(m: Means) -> Array:
    change: Array = m["nll_pruned"] - m["nll_full"]
    return change


def _change_slope(x: Mapping[str, Array], _: Means) -> Array:
    change: Array = x["nll_pruned"] - x["nll_full"]
    return change


def _rms(m: Means) -> Array:
    root: Array = np.sqrt(m["delta_p_sq"])
    return root


def _rms_slope(x: Mapping[str, Array], m: Means) -> Array:
    return x["delta_p_sq"] * (0.5 / _rms(m))


MEAN_STATISTICS = (
    _ppl("pruned"),
    _ppl("full"),
    MeanStatistic("nll_correlation", "", _correlation, None),
    MeanStatistic("ln_ppl_change", "nats", _ln_change, _change_slope),
    MeanStatistic(
        "ppl_quotient",
        "",
        lambda m: np.exp(_ln_change(m)),
        lambda x, m: np.exp(_ln_change(m)) * _change_slope(x, m),
    ),
    MeanStatistic(
        "ppl_difference",
        "",
        lambda m: np.exp(m["nll_pruned"]) - np.exp(m["nll_full"]),
        lambda x, m: (
            np.exp(m["nll_pruned"]) * x["nll_pruned"] - np.exp(m["nll_full"]) * x["nll_full"]
        ),
    ),
    mean_of("kl_mean", "nats", "kl"),
    mean_of("delta_p_mean", "", "delta_p"),
    MeanStatistic("delta_p_rms", "", _rms, _rms_slope),
    mean_of("same_top_frac", "", "same_top"),
    mean_of("jsd_mean", "nats", "jsd"),
    mean_of("margin_full_mean", "nats", "margin_full"),
    mean_of("margin_pruned_mean", "nats", "margin_pruned"),
)
"""In llama.cpp's order; the last three it does not print."""
