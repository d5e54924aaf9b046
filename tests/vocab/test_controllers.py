"""Each controller against its formula over all runs so far; none sees a later one."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_ngram as slow
from tracekit.errors import TracekitError, UsageError
from tracekit.vocab.controller import CONTROLLERS, Controller, Run, weights
from tracekit.vocab.controllers.drift import Drift
from tracekit.vocab.controllers.entropy import Entropy
from tracekit.vocab.controllers.rate import Rate
from tracekit.vocab.controllers.thermo import Thermo

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = st.integers(0, 10**6)
GAINS = st.floats(0, 3)
WINDOWS = st.integers(1, 12)


def make_runs(seed: int, number: int = 30, scale: float = 1.0) -> list[Run]:
    """Return runs whose entropy changes its level half way."""
    rng = np.random.default_rng(seed)
    entropy_R = rng.gamma(2, 0.5, number) + np.where(np.arange(number) < number // 2, 0, 2)
    energy_R = 2 * entropy_R - 20 + rng.standard_normal(number)
    return [
        Run(
            entropy_nats=scale * entropy,
            varentropy=scale * float(rng.gamma(2, 1)),
            free_energy=scale * (energy - entropy),
            internal_energy=scale * energy,
            surprisal_nats=scale * float(rng.exponential()),
            hidden_E=(3 + rng.standard_normal(5)).astype(np.float32),
        )
        for entropy, energy in zip(entropy_R.tolist(), energy_R.tolist(), strict=True)
    ]


def check_against(
    controller: Controller, runs: list[Run], power: Callable[[list[Run]], float]
) -> None:
    """Compare weights with the power that a twin finds from the runs before each step."""
    count_S = list(range(len(runs) + 1))
    powers = [min(max(power(runs[:count]), -50.0), 50.0) for count in count_S]
    found_S = np.log(weights(controller, runs, count_S))
    np.testing.assert_allclose(found_S, powers, rtol=1e-9, atol=1e-9)


def parameters(controller: Controller) -> dict[str, Any]:
    return {one.name: getattr(controller, one.name) for one in fields(controller)}  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(SEEDS, GAINS, WINDOWS)
def test_entropy_weighs_by_the_mean_of_the_last_entropies(
    seed: int, gain: float, window: int
) -> None:
    one = Entropy(gain=gain, window=window)
    check_against(one, make_runs(seed), lambda runs: slow.entropy_power(runs, **parameters(one)))


@settings(max_examples=25, deadline=None)
@given(SEEDS, GAINS, GAINS, WINDOWS)
def test_rate_weighs_by_exponential_means_of_entropy_and_its_change(
    seed: int, gain: float, level: float, window: int
) -> None:
    one = Rate(gain=gain, level=level, window=window)
    check_against(one, make_runs(seed), lambda runs: slow.rate_power(runs, **parameters(one)))


@settings(max_examples=25, deadline=None)
@given(SEEDS, GAINS, WINDOWS)
def test_drift_weighs_by_the_angle_between_the_last_states_and_all(
    seed: int, gain: float, window: int
) -> None:
    one = Drift(gain=gain, window=window)
    check_against(one, make_runs(seed), lambda runs: slow.drift_power(runs, **parameters(one)))


@settings(max_examples=25, deadline=None)
@given(
    SEEDS,
    st.sampled_from(["typical", "free-energy"]),
    GAINS,
    GAINS,
    st.floats(0, 1),
    st.floats(1, 9),
)
def test_thermo_weighs_by_the_state_of_the_stretch_that_the_text_is_in(
    seed: int, drive: Any, gain: float, z: float, slack: float, threshold: float
) -> None:
    one = Thermo(drive=drive, gain=gain, z=z, slack=slack, threshold=threshold)
    check_against(one, make_runs(seed), lambda runs: slow.thermo_power(runs, **parameters(one)))


VARIANTS = {
    one.text: one
    for one in (
        *(CONTROLLERS.get(name)() for name in CONTROLLERS.names()),
        Rate(level=1.0),
        Thermo(drive="free-energy", gain=1.0, threshold=2.0),
    )
}
every_controller = pytest.mark.parametrize("controller", VARIANTS.values(), ids=VARIANTS)
every_adaptive = pytest.mark.parametrize(
    "controller", [one for one in VARIANTS.values() if one.adapts], ids=lambda one: one.text
)


@every_controller
def test_no_weight_depends_on_later_runs(controller: Controller) -> None:
    runs, others = make_runs(1), make_runs(2, scale=5.0)
    count_S = list(range(len(runs)))
    whole_S = weights(controller, runs, count_S)
    for seen in count_S:
        mixed = weights(controller, runs[:seen] + others[seen:], count_S)
        assert mixed[: seen + 1].tolist() == whole_S[: seen + 1].tolist()


@every_controller
def test_before_any_run_all_weigh_the_same(controller: Controller) -> None:
    assert controller.start().weight() == 1


@every_controller
def test_looking_at_a_weight_changes_nothing(controller: Controller) -> None:
    runs = make_runs(3)
    tracker = controller.start()
    for run in runs:
        tracker.observe(run)
    assert tracker.weight() == tracker.weight() == weights(controller, runs, [len(runs)])[0]


@every_controller
@pytest.mark.parametrize("scale", [0.0, 1e-200, 1e6])
def test_weights_are_above_zero_and_finite_whatever_the_entropies(
    controller: Controller, scale: float
) -> None:
    runs = make_runs(4, scale=scale)
    assert len(weights(controller, runs, list(range(len(runs))))) == len(runs)


@every_controller
def test_states_without_a_direction_are_no_error(controller: Controller) -> None:
    runs = [run._replace(hidden_E=np.zeros(5, np.float32)) for run in make_runs(5)]
    assert np.isfinite(weights(controller, runs, [0, 1, 20])).all()


@every_adaptive
def test_a_run_without_numbers_is_an_error_and_no_weight(controller: Controller) -> None:
    nan = math.nan
    none = Run(nan, nan, nan, nan, nan, np.full(5, nan, np.float32))
    runs = make_runs(6)
    with pytest.raises(TracekitError, match="not above 0 and finite"):
        weights(controller, [*runs, none], [len(runs) + 1])


@every_adaptive
def test_a_gain_of_zero_is_a_fixed_size(controller: Controller) -> None:
    still = {name: 0 for name in ("gain", "level") if name in parameters(controller)}
    runs = make_runs(7)
    weight_S = weights(type(controller)(**parameters(controller) | still), runs, [0, 5, 30])
    assert weight_S.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [Entropy, Rate, Drift])
def test_an_empty_window_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="window must be at least 1"):
        kind(window=0)
