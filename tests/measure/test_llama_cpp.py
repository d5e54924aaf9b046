"""The 16-bit codes against loops in float32 and against the reader of llama.cpp's files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles_next_token import coded
from tests.record.test_kld import encode
from tracekit.measure.llama_cpp import coded_log_probs
from tracekit.record.kld_file import decode

LOGITS = st.one_of(st.floats(-30, 30, width=32), st.just(-math.inf), st.integers(-2, 2).map(float))
ROWS = st.lists(LOGITS, min_size=1, max_size=30).filter(lambda row: max(row) > -math.inf)

HALF_CODE_NATS = 16 / 65535 / 2 + 1e-5


@given(ROWS)
def test_codes_are_those_of_the_loop_and_of_the_file(logits: list[float]) -> None:
    found_V = coded_log_probs(torch.tensor([logits]))[0].numpy()
    # Where float32 rounds a half the other way, the code is one off.
    one_code = 16 / 65535 + 1e-5
    np.testing.assert_allclose(found_V, coded(logits), atol=one_code)
    row = np.frombuffer(encode(logits), "<u2")[None]
    np.testing.assert_allclose(found_V, decode(row, len(logits)).log_prob_TV[0], atol=one_code)


def test_what_is_near_the_highest_is_within_half_a_code_and_the_rest_stands_at_the_clamp() -> None:
    logits_TV = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)) * 6
    logits_TV[:, :9] = -math.inf
    logp_TV = logits_TV.double().log_softmax(1)
    wanted_TV = logp_TV.maximum(logp_TV.amax(1, keepdim=True) - 16)
    error_TV = (coded_log_probs(logits_TV).double() - wanted_TV).abs()
    assert float(error_TV.max()) < HALF_CODE_NATS


@pytest.mark.parametrize("spread", [1e-38, 1e-36, 1e-34, 1e-30])
def test_logits_that_are_nearly_equal_have_a_number(spread: float) -> None:
    found_TV = coded_log_probs(torch.tensor([[0.0, spread, 0.0]]))
    np.testing.assert_allclose(found_TV.numpy(), -math.log(3), rtol=1e-6)


def test_equal_logits_have_one_code() -> None:
    found_TV = coded_log_probs(torch.full((2, 8), 3.25))
    np.testing.assert_allclose(found_TV.numpy(), -math.log(8), rtol=1e-6)
