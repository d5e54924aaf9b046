"""The true distribution of a step and the sets of samplers, against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit.vocab import truth as truth_module
from tracekit.vocab.truth import RULES, Truth

ROWS = st.lists(st.integers(-900, 900).map(lambda n: n / 100), min_size=1, max_size=80)


def truth_of(logits: list[float], chosen: int = 0) -> Truth:
    return Truth.of(torch.tensor([logits], dtype=torch.float64), torch.tensor([chosen]))


@settings(max_examples=100)
@given(ROWS, st.sampled_from([50, 1024]), st.data())
def test_facts_are_those_of_loops_however_few_tokens_are_looked_at_first(
    logits: list[float], prefix: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truth_module, "PREFIXES", (prefix,))
        facts = truth_of(logits, chosen).facts()
    p, best = slow.softmax(logits), slow.order(logits)[0]
    assert facts["token_id"].tolist() == [chosen]
    assert facts["best_id"].tolist() == [best]
    assert facts["nll_full"].item() == pytest.approx(-math.log(p[chosen]))
    assert facts["best_prob"].item() == pytest.approx(p[best])
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    assert facts["entropy_nats"].item() == pytest.approx(entropy, abs=1e-12)
    wanted = slow.sampler_sets(logits)
    assert set(RULES) == set(wanted)
    for rule, some in wanted.items():
        assert facts[f"{rule}_size"].tolist() == [len(some)], rule


@pytest.mark.parametrize("width", [1100, 3000])
def test_a_nucleus_of_more_tokens_than_are_looked_at_first_is_found_whole(width: int) -> None:
    logits = [-(i % 97) / 100 for i in range(width)]
    facts = truth_of(logits).facts()
    assert facts["top_p_size"].item() == len(slow.sampler_sets(logits)["top_p"])


def test_tokens_as_likely_as_the_last_of_a_set_count() -> None:
    facts = truth_of([0.0] * 20).facts()
    assert {rule: facts[f"{rule}_size"].item() for rule in RULES} == dict.fromkeys(RULES, 20)


def test_a_masked_token_has_no_entropy() -> None:
    facts = truth_of([0.0, -math.inf, 0.0], chosen=1).facts()
    assert facts["entropy_nats"].item() == pytest.approx(math.log(2))
    assert facts["nll_full"].item() == math.inf
    assert facts["top_p_size"].item() == 2


def test_the_most_likely_of_equal_tokens_is_the_one_of_lowest_id() -> None:
    assert truth_of([1.0, 2.0, 2.0]).facts()["best_id"].item() == 1
