"""A quantile of all steps alike, and its interval, against drawn sequences pooled one by one."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.measure.pooled_quantile import pooled_quantile

_VALUES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0])),
    min_size=1,
    max_size=25,
)


@settings(max_examples=12, deadline=None)
@given(_VALUES, st.sampled_from([0.1, 0.5, 0.8, 1.0]))
def test_a_pooled_quantile_is_that_of_the_steps_of_drawn_sequences(
    steps: list[tuple[int, float]], quantile: float
) -> None:
    code_S, names = pd.factorize(np.array([one for one, _ in steps]))
    values_S = np.array([value for _, value in steps])
    value, low, high = pooled_quantile(values_S, code_S, quantile, seed=5)
    assert value == np.quantile(values_S, quantile, method="inverted_cdf")
    if len(names) < 3:
        assert math.isnan(low)
        assert math.isnan(high)
        return
    draws = []
    for draw in np.random.default_rng(5).integers(len(names), size=(1000, len(names))):
        pooled = [value for one in draw for value in values_S[code_S == one]]
        draws.append(sorted(pooled)[math.ceil(quantile * len(pooled) - 1e-9) - 1])
    draws.sort()
    assert (low, high) == (draws[24], draws[974])
