"""Measures of nested sets against sums over explicit sets and distributions."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import oracles_vocab as slow
from tracekit.errors import TracekitError
from tracekit.measure.logits import best_ids
from tracekit.vocab.coverage import Prefixes
from tracekit.vocab.truth import Truth

# Differences of logits are large enough to survive the shift to log-probabilities.
LOGITS = st.one_of(
    st.integers(-3000, 3000).map(lambda n: n / 100),
    st.integers(-2, 2).map(float),
    st.just(-math.inf),
)
Drawn = tuple[list[list[float]], list[int], list[int], list[list[int]]]


def covered(
    logits_SV: list[list[float]],
    chosen_S: list[int],
    pinned_P: list[int],
    ranking_SK: list[list[int]],
    sizes: list[int],
) -> dict[str, torch.Tensor]:
    prefixes = prefixes_of(logits_SV, chosen_S, pinned_P, ranking_SK, max(sizes))
    size_SN = torch.tensor(sizes).expand(len(logits_SV), -1)
    return prefixes.covered(prefixes.counts(size_SN), size_SN >= len(logits_SV[0]))


def prefixes_of(
    logits_SV: list[list[float]],
    chosen_S: list[int],
    pinned_P: list[int],
    ranking_SK: list[list[int]],
    limit: int,
) -> Prefixes:
    truth = Truth.of(torch.tensor(logits_SV, dtype=torch.float64), torch.tensor(chosen_S))
    ranking = torch.tensor(ranking_SK, dtype=torch.int64)
    return Prefixes.of(truth, ranking, torch.tensor(pinned_P, dtype=torch.int64), limit)


@st.composite
def cases(draw: st.DrawFn, most: int = 80) -> Drawn:
    """Logits, chosen tokens, pinned tokens, and rankings of any length with gaps."""
    width, steps = draw(st.integers(1, most)), draw(st.integers(1, 3))
    ids = list(range(width))
    rng = random.Random(draw(st.integers(0, 10**6)))
    scale = draw(st.sampled_from([0.0, 0.3, 3.0]))
    logits = []
    for _ in range(steps):
        row = [round(rng.gauss(0, 1) * scale, 2) for _ in ids]
        for i, value in draw(st.dictionaries(st.sampled_from(ids), LOGITS, max_size=8)).items():
            row[i] = value
        assume(max(row) > -math.inf)
        logits.append(row)
    chosen = [rng.choice(ids) for _ in range(steps)]
    pinned = rng.sample(ids, draw(st.integers(0, width)))
    columns = draw(st.integers(1, width))
    # Best first half of the time, so that small sets hold samplers' sets too.
    rankings = []
    for row in logits:
        ranking = draw(st.sampled_from([slow.order(row), rng.sample(ids, width)]))[:columns]
        gaps = draw(st.sets(st.integers(0, columns - 1), max_size=2))
        rankings.append([-1 if place in gaps else i for place, i in enumerate(ranking)])
    return logits, chosen, pinned, rankings


@settings(max_examples=150)
@given(cases(), st.lists(st.integers(1, 82), min_size=1, max_size=4))
def test_every_measure_equals_that_of_the_explicit_set(case: Drawn, sizes: list[int]) -> None:
    logits, chosen, pinned, rankings = case
    found = covered(logits, chosen, pinned, rankings, sizes)
    for step, ranking in enumerate(rankings):
        for n, size in enumerate(sizes):
            wanted = slow.covered(logits[step], ranking, pinned, size, chosen[step])
            assert set(wanted) == set(found)
            for name, value in wanted.items():
                got = float(found[name][step, n])
                assert got == pytest.approx(value, rel=1e-9, abs=1e-12), name


@settings(max_examples=30)
@given(cases(most=14))
def test_all_sizes_at_once_are_each_by_itself(case: Drawn) -> None:
    sizes = list(range(1, len(case[0][0]) + 2))
    together = covered(*case, sizes)
    for n, size in enumerate(sizes):
        for name, alone_S1 in covered(*case, [size]).items():
            torch.testing.assert_close(
                together[name][:, n : n + 1], alone_S1, rtol=1e-8, atol=1e-14
            )


@settings(max_examples=100)
@given(cases(most=40), st.integers(1, 39))
def test_the_identities_of_exact_pruning_hold(case: Drawn, size: int) -> None:
    logits, _, pinned, rankings = case
    found = covered(*case, [size])
    entropy_S = Truth.of(torch.tensor(logits, dtype=torch.float64), torch.tensor(case[1])).facts()
    for step, ranking in enumerate(rankings):
        p = slow.softmax(logits[step])
        inside = slow.candidate_set(ranking, pinned, size, len(p))
        kept = math.fsum(p[i] for i in inside)
        m = 1 - float(found["missing_mass"][step, 0])
        if kept < 1e-12:
            continue
        q = [p[i] / kept if i in inside else 0.0 for i in range(len(p))]
        tail = 1 - kept
        rest = [0.0 if i in inside else p[i] / tail for i in range(len(p))] if tail > 1e-12 else []
        pairs = list(zip(p, q, strict=True))
        assert math.fsum(abs(a - b) for a, b in pairs) / 2 == pytest.approx(1 - m, abs=1e-6)
        assert math.fsum(min(pair) for pair in pairs) == pytest.approx(m, abs=1e-6)
        hellinger_sq = math.fsum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in pairs) / 2
        assert hellinger_sq == pytest.approx(1 - math.sqrt(m), abs=1e-6)
        loss = float(found["neg_log_mass_nats"][step, 0])
        assert slow.kullback_leibler(q, p) == pytest.approx(loss, abs=1e-6)
        divergence = float(found["jsd_nats"][step, 0])
        assert slow.jensen_shannon(p, q) == pytest.approx(divergence, abs=1e-6)
        chain = binary_entropy(m) + m * entropy(q) + (1 - m) * entropy(rest)
        assert float(entropy_S["entropy_nats"][step]) == pytest.approx(chain, abs=1e-6)


def entropy(p: list[float]) -> float:
    return -math.fsum(x * math.log(x) for x in p if x > 0)


def binary_entropy(m: float) -> float:
    return entropy([m, max(0.0, 1 - m)])


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(2, 60), st.data(), st.sampled_from([0.0, 0.5, 3.0, 9.0]))
def test_what_the_best_tokens_say_brackets_the_entropy(
    seed: int, width: int, data: st.DataObject, spread: float
) -> None:
    size = data.draw(st.integers(1, width - 1))
    rng = torch.Generator().manual_seed(seed)
    logits_SV = torch.randn(3, width, generator=rng, dtype=torch.float64) * spread
    truth = Truth.of(logits_SV, torch.zeros(3, dtype=torch.int64))
    ids_SK = best_ids(logits_SV, size)
    prefixes = Prefixes.of(truth, ids_SK, torch.empty(0, dtype=torch.int64), size)
    entropy_S = truth.facts()["entropy_nats"]
    rest_S = prefixes.outside[:, size]
    inside_S = entropy_S - prefixes.entropy_outside[:, size]
    last_S = truth.logp_SV.gather(1, ids_SK)[:, -1]
    low_S = inside_S - rest_S * last_S
    high_S = inside_S + torch.xlogy(rest_S, (width - size) / rest_S)
    assert (low_S <= entropy_S + 1e-9).all()
    assert (entropy_S <= high_S + 1e-9).all()


def test_pinned_tokens_come_beside_the_size_and_are_counted_once() -> None:
    logits = [[5.0, 4.0, 3.0, 2.0, 1.0]]
    found = covered(logits, [4], [0, 4], [[0, 1, 2, 3, 4]], [1, 2])
    assert found["set_size"].tolist() == [[3, 4]]
    assert found["hit_chosen"].tolist() == [[True, True]]
    p = slow.softmax(logits[0])
    assert float(found["missing_mass"][0, 0]) == pytest.approx(p[2] + p[3])


def test_a_tail_far_below_rounding_is_still_told() -> None:
    found = covered([[0.0, -100.0, -101.0]], [1], [], [[0]], [1])
    tail = math.exp(-100) + math.exp(-101)
    assert float(found["neg_log_mass_nats"]) == pytest.approx(tail, rel=1e-9)
    assert float(found["missing_mass"]) == pytest.approx(tail, rel=1e-9)
    assert float(found["nll_backoff"]) == pytest.approx(-math.log(tail / 2), rel=1e-9)


def test_a_set_of_almost_no_mass_loses_what_its_logits_say() -> None:
    found = covered([[0.0, -600.0]], [0], [], [[1]], [1])
    assert float(found["neg_log_mass_nats"]) == pytest.approx(600)
    assert float(found["missing_mass"]) == 1


def test_what_is_missed_is_at_most_all_there_is() -> None:
    # Ten probabilities whose rounded sum is above 1, and a candidate that is masked.
    logits = [[1.5410, -0.2934, -2.1788, 0.5684, 0.1, 0.2, 0.3, 0.7, 0.9, 1.1, -math.inf]]
    for turn in range(10):
        row = logits[0][:10]
        found = covered([row[turn:] + row[:turn] + [-math.inf]], [0], [], [[10]], [1])
        assert float(found["missing_mass"]) <= 1
        assert float(found["jsd_nats"]) == pytest.approx(math.log(2))
        assert float(found["neg_log_mass_nats"]) == math.inf


def test_the_first_of_equal_logits_is_the_most_likely_token() -> None:
    found = covered([[1.0, 1.0, 1.0]], [0], [], [[2, 1, 0]], [1, 2])
    assert found["hit_argmax"].tolist() == [[False, False]]


def test_tokens_as_likely_as_the_last_of_a_sampler_set_belong_to_it() -> None:
    # Of 60 equal tokens the 50th is as likely as the 60th.
    found = covered([[0.0] * 60], [0], [], [list(range(60))], [50, 59, 60])
    assert found["hit_top_k"].tolist() == [[False, False, True]]
    found = covered([[1.0] * 49 + [0.0] + [-1.0] * 10], [0], [], [list(range(60))], [49, 50])
    assert found["hit_top_k"].tolist() == [[False, True]]


def test_masked_tokens_are_in_no_sampler_set() -> None:
    found = covered([[0.0, -math.inf, 1.0]], [0], [], [[2, 0]], [1, 2])
    for rule in ("top_k", "top_p", "min_p"):
        assert found[f"hit_{rule}"].tolist() == [[False, True]]


def test_a_recorded_token_that_is_masked_is_a_surprise_without_end_but_to_the_back_off() -> None:
    logits = [[0.0, -math.inf, 1.0, 0.5]]
    found = covered(logits, [1], [], [[2, 0, 1, 3]], [2, 4])
    assert found["nll_full"].tolist() == [[math.inf, math.inf]]
    tail = slow.softmax(logits[0])[3]
    assert float(found["nll_backoff"][0, 0]) == pytest.approx(-math.log(tail / 2))
    assert float(found["nll_backoff"][0, 1]) == math.inf


def test_what_is_whole_is_the_full_head_though_its_ranking_is_short() -> None:
    prefixes = prefixes_of([[0.0, 1.0, 2.0]], [0], [], [[1]], 1)
    count_SN = torch.tensor([[1, 1]])
    found = prefixes.covered(count_SN, torch.tensor([[False, True]]))
    assert found["set_size"].tolist() == [[1, 3]]
    assert found["hit_chosen"].tolist() == found["hit_argmax"].tolist() == [[False, True]]
    assert float(found["backoff_kl_nats"][0, 1]) == 0
    assert float(found["nll_backoff"][0, 1]) == float(found["nll_full"][0, 1])


def test_a_check_is_told_the_logits_of_each_set() -> None:
    prefixes = prefixes_of([[0.0, 1.0, 2.0, 9.0]], [0], [1], [[2, 0]], 2)
    scored = prefixes.scored(torch.tensor([[0, 1, 2]]))
    assert scored.best_SN.tolist() == [[1.0, 2.0, 2.0]]
    wanted = [slow.log_z(some) for some in ([1.0], [1.0, 2.0], [0.0, 1.0, 2.0])]
    assert scored.logsumexp_SN[0].tolist() == pytest.approx(wanted)


def test_an_empty_set_scores_nothing() -> None:
    scored = prefixes_of([[0.0, 1.0]], [0], [], [[-1]], 1).scored(torch.tensor([[0]]))
    assert scored.best_SN.item() == scored.logsumexp_SN.item() == -math.inf


def test_a_ranking_that_holds_a_token_twice_is_refused() -> None:
    with pytest.raises(TracekitError, match="twice"):
        covered([[0.0, 1.0, 2.0]], [0], [], [[1, 1]], [2])


def test_a_ranking_of_a_token_that_the_head_does_not_have_is_refused() -> None:
    with pytest.raises(TracekitError, match="token 3 of a head of 3 rows"):
        covered([[0.0, 1.0, 2.0]], [0], [], [[1, 3]], [2])
