"""Statistics of N values that stand as often as weights say, for R resamples at once: [R, N] to [R].

Numpy alone. Resampling whole sequences gives each of their values a whole number as its weight.
"""

from __future__ import annotations

import numpy as np

_FLAT = 1e-20
"""A variance of logarithms or ranks below this is rounding."""


def quotient(over_N: np.ndarray, under_N: np.ndarray | float, weight_RN: np.ndarray) -> np.ndarray:
    """Return the weighted sum of one number over that of another."""
    made: np.ndarray = (weight_RN * over_N).sum(1) / (weight_RN * under_N).sum(1)
    return made


def median(value_N: np.ndarray, weight_RN: np.ndarray) -> np.ndarray:
    """Return the medians of values that stand as often as their weights say."""
    order = np.argsort(value_N, kind="stable")
    below_RN = np.cumsum(weight_RN[:, order], axis=1)
    half_R = below_RN[:, -1:] / 2
    low_R, high_R = (below_RN >= half_R).argmax(1), (below_RN > half_R).argmax(1)
    made: np.ndarray = (value_N[order][low_R] + value_N[order][high_R]) / 2
    return made


def median_factor(log_N: np.ndarray, weight_RN: np.ndarray) -> np.ndarray:
    """Return the medians of logarithms, as factors."""
    made: np.ndarray = np.exp(median(log_N, weight_RN))
    return made


def ranks(value_N: np.ndarray, weight_RN: np.ndarray) -> np.ndarray:
    """Return average ranks [R, N] of values that stand as often as their weights say."""
    distinct, code_N = np.unique(value_N, return_inverse=True)
    order = np.argsort(code_N, kind="stable")
    starts = np.searchsorted(code_N[order], np.arange(len(distinct)))
    weight_RU = np.add.reduceat(weight_RN[:, order], starts, axis=1)
    found: np.ndarray = (np.cumsum(weight_RU, axis=1) - (weight_RU - 1) / 2)[:, code_N]
    return found


def spearman(x_N: np.ndarray, y_N: np.ndarray, weight_RN: np.ndarray) -> np.ndarray:
    """Return weighted rank correlations; NaN where one does not vary."""
    return pearson(ranks(x_N, weight_RN), ranks(y_N, weight_RN), weight_RN)


def pearson(x: np.ndarray, y: np.ndarray, weight_RN: np.ndarray) -> np.ndarray:
    """Return weighted correlations of [N] or [R, N]; NaN where one does not vary."""
    _, _, xx_R, xy_R, yy_R = _moments(x, y, weight_RN)
    with np.errstate(divide="ignore", invalid="ignore"):
        made: np.ndarray = xy_R / np.sqrt(xx_R * yy_R)
    return made


def line(x: np.ndarray, y: np.ndarray, weight_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return intercepts and slopes of weighted least squares; NaN where ``x`` does not vary."""
    x_R, y_R, xx_R, xy_R, _ = _moments(x, y, weight_RN)
    with np.errstate(divide="ignore", invalid="ignore"):
        b_R = xy_R / xx_R
    return y_R - b_R * x_R, b_R


def _moments(x: np.ndarray, y: np.ndarray, weight_RN: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return weighted means and (co)variances xx, xy, yy; what rounding leaves of none is NaN."""
    with np.errstate(invalid="ignore"):  # the only sequence, left out, has no others
        share_RN = weight_RN / weight_RN.sum(1, keepdims=True)
    x_R, y_R = ((share_RN * one).sum(1, keepdims=True) for one in (x, y))
    dx, dy = x - x_R, y - y_R
    xx_R, xy_R, yy_R = ((share_RN * one).sum(1) for one in (dx * dx, dx * dy, dy * dy))
    xx_R, yy_R = (np.where(one > _FLAT, one, np.nan) for one in (xx_R, yy_R))
    return x_R[:, 0], y_R[:, 0], xx_R, xy_R, yy_R
