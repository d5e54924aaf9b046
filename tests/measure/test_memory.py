from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report import fake
from tracekit.errors import UsageError
from tracekit.measure.memory import MOST_LAYERS, MOST_TOKENS, CachedLayer, CachePlan, CacheShape
from tracekit.spec import ModelSpec

LAYERS = st.lists(
    st.builds(
        CachedLayer,
        numbers_per_token=st.integers(1, 64),
        window=st.none() | st.integers(1, 9),
    ),
    max_size=4,
)
FRACTIONS = st.sampled_from([0.1, 0.25, 0.3, 1 / 3, 0.7, 1.0])


def slow_bytes(plan: CachePlan, num_tokens: int) -> Fraction:
    """Return the bytes of one request, token by token and layer by layer."""
    numbers = 0
    for layer in plan.cache.layers:
        for token in range(num_tokens):
            if layer.window is None or token < layer.window:
                numbers += layer.numbers_per_token
    scale = Fraction(repr(plan.bytes_per_number)) * Fraction(repr(plan.kept_frac))
    return numbers * scale + plan.cache.state_bytes


def has_no_end(cache: CacheShape) -> bool:
    """Return whether some layer holds every token."""
    return any(layer.window is None for layer in cache.layers)


@st.composite
def plans(draw: st.DrawFn) -> CachePlan:
    cache = CacheShape(layers=tuple(draw(LAYERS)), state_bytes=draw(st.sampled_from([0, 40])))
    number_bytes = draw(st.sampled_from([2, 1, 0.5]))
    return CachePlan(cache=cache, bytes_per_number=number_bytes, kept_frac=draw(FRACTIONS))


@given(plan=plans(), num_tokens=st.integers(0, 30))
def test_bytes_are_those_of_a_loop_over_tokens_and_layers(plan: CachePlan, num_tokens: int) -> None:
    slow = slow_bytes(plan, num_tokens)
    assert plan.request_bytes(num_tokens) == float(slow)
    assert plan.bytes_T(np.array([0, num_tokens]))[1] == pytest.approx(float(slow), rel=1e-12)
    assert plan.token_bytes(num_tokens) == float(slow_bytes(plan, num_tokens + 1) - slow)


@given(plan=plans(), num_tokens=st.integers(0, 12), room=st.integers(-50, 4000))
def test_requests_are_added_until_one_more_does_not_fit(
    plan: CachePlan, num_tokens: int, room: int
) -> None:
    one = slow_bytes(plan, num_tokens)
    if one == 0:
        assert plan.requests(num_tokens, room) is None
        return
    fitting = 0
    while (fitting + 1) * one <= room:
        fitting += 1
    assert plan.requests(num_tokens, room) == fitting


@given(plan=plans(), batch=st.integers(1, 4), room=st.integers(-50, 3000))
def test_a_context_grows_until_one_token_more_does_not_fit(
    plan: CachePlan, batch: int, room: int
) -> None:
    longest: int | None = 0
    # Nothing grows past the longest window, and whatever grows passes this room before.
    beyond = 40_000
    while longest is not None and batch * slow_bytes(plan, longest + 1) <= room:
        longest = longest + 1 if longest < 20 or has_no_end(plan.cache) else None
        assert longest is None or longest < beyond
    assert plan.longest(batch, room) == longest


def test_the_quoted_example_is_21_5_gigabytes_and_not_34_4() -> None:
    cache = CacheShape.uniform(num_layers=32, num_kv_heads=40, head_dim=64)
    assert CachePlan(cache=cache).request_bytes(65_536) == 21_474_836_480


def test_a_decimal_fraction_is_taken_as_written() -> None:
    cache = CacheShape.uniform(num_layers=1, num_kv_heads=1, head_dim=5)
    # 0.3 as a float is a little less than three tenths: ten requests of 6 bytes fit in 60 exactly.
    assert CachePlan(cache=cache, kept_frac=0.3).requests(1, 60) == 10
    assert CachePlan(cache=cache, kept_frac=0.3).longest(10, 60) == 1


def test_a_recorded_model_has_the_bytes_of_its_spec() -> None:
    spec = fake.spec()
    plan = CachePlan(cache=CacheShape.of(spec))
    for num_tokens in (0, 1, 500, 8192):
        assert plan.request_bytes(num_tokens) == spec.kv_bytes(num_tokens)
    assert plan.token_bytes(0) == 2 * 2 * 30 * 3 * 64


def test_windows_and_shared_layers_of_a_spec_are_counted_as_they_are() -> None:
    data = json.loads(json.dumps(fake.spec().to_json()))
    data["layers"][0] |= {"kind": "sliding", "window": 128}
    data["layers"][1] |= {"kind": "shared", "owner": 0}
    data["layers"][2] |= {"kind": "linear", "num_heads": 0, "num_kv_heads": 0}
    spec = ModelSpec.from_json(data)
    cache = CacheShape.of(spec)
    assert len(cache.layers) == 28
    plan = CachePlan(cache=cache)
    for num_tokens in (1, 127, 128, 129, 4000):
        assert plan.request_bytes(num_tokens) == spec.kv_bytes(num_tokens)
    # Past the window of the first layer a token adds what the other 27 hold.
    assert plan.token_bytes(128) == 2 * 27 * 2 * 3 * 64 < plan.token_bytes(127)


def test_a_cache_that_does_not_grow_has_no_longest_context() -> None:
    sliding = CacheShape(layers=(CachedLayer(numbers_per_token=4, window=8),))
    assert CachePlan(cache=sliding).longest(1, 64) is None
    assert CachePlan(cache=sliding).longest(1, 63) == 7
    assert CachePlan(cache=CacheShape(layers=())).requests(10, 1) is None


def test_the_longest_context_ends_before_at_and_after_a_window() -> None:
    """A layer of 4 numbers with a window of 8, one of 2 without an end; a number is a byte."""
    layers = (
        CachedLayer(numbers_per_token=4, window=8),
        CachedLayer(numbers_per_token=2),
    )
    plan = CachePlan(cache=CacheShape(layers=layers, state_bytes=10), bytes_per_number=1)
    rooms = {9: 0, 10: 0, 16: 1, 57: 7, 58: 8, 59: 8, 60: 9, 158: 58}
    assert {room: plan.longest(1, room) for room in rooms} == rooms


def test_the_largest_numbers_of_a_plan_are_exact() -> None:
    cache = CacheShape.uniform(num_layers=MOST_LAYERS, num_kv_heads=65_536, head_dim=65_536)
    plan = CachePlan(cache=cache, bytes_per_number=8, kept_frac=1.0)
    numbers = 2 * MOST_LAYERS * 65_536**2 * MOST_TOKENS
    assert cache.numbers(MOST_TOKENS) == numbers > 2**63
    assert plan.request_bytes(MOST_TOKENS) == 8.0 * numbers
    assert plan.requests(MOST_TOKENS, 8.0 * numbers) == 1
    least = CachePlan(cache=CacheShape.uniform(num_layers=1, num_kv_heads=1, head_dim=1))
    assert least.longest(1, 2.0**90) == 2**88


@pytest.mark.parametrize("kept", [0.0, -0.1, 1.1, float("nan")])
def test_a_kept_fraction_out_of_range_is_refused(kept: float) -> None:
    with pytest.raises(UsageError, match="kept fraction"):
        CachePlan(cache=CacheShape(layers=()), kept_frac=kept)


@pytest.mark.parametrize("number_bytes", [0.0, -1.0, 9.0, float("nan")])
def test_bytes_a_number_out_of_range_are_refused(number_bytes: float) -> None:
    with pytest.raises(UsageError, match="bytes"):
        CachePlan(cache=CacheShape(layers=()), bytes_per_number=number_bytes)


def test_a_batch_has_a_request() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        CachePlan(cache=CacheShape(layers=())).longest(0, 1)
