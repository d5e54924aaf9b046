"""Scorers by position and attention, on examples that can be worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.kv.cases import Case, make_case, make_engine, run_family
from tracekit.errors import UsageError
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse


def kept(case, text, point, *, head=0):
    """Return the positions before the point that one policy keeps in a KV head of the first layer."""
    result = run_family(case, [parse(text)], point)
    return np.flatnonzero(result.evicted_at_NLGT[0, 0, head, :point] == NEVER).tolist()


def one_head(weights_QK, values=None):
    """Return a case of one head whose row q gives key j the weight ``weights_QK[q][j]``.

    Keys name their position, so that queries can be logits; rows are scaled to sum to 1.
    """
    weights = np.array(weights_QK, dtype=float)
    case = make_case(layers=1, groups=1, group_size=1, rows=len(weights), size=len(weights))
    query = np.log(np.maximum(weights, 1e-30)) / case.layer.scale
    value = case.value_LGTD if values is None else np.array(values, dtype=float)[None, None]
    return Case(case.layer, query[None, None], np.eye(len(weights))[None, None], value, rope=None)


@pytest.mark.parametrize("num_kept", [4, 7, 12, 23, 32, 50])
def test_an_even_middle_has_gaps_of_one_power_of_two_or_twice_that(num_kept):
    case = make_case(rows=70)
    found = kept(case, f"sinkuniform:kept={num_kept}tok,sinks=0,recent=0", 64)
    assert len(found) == num_kept
    gaps = np.diff(found)
    step = 2 ** int(np.log2(64 / num_kept))
    assert set(gaps.tolist()) <= {step, 2 * step}


def test_an_even_middle_stays_even_when_it_is_thinned_out_again_and_again():
    case = make_case(rows=90)
    result = run_family(case, [parse("sinkuniform:kept=20tok,every=1,sinks=4,recent=8")], 20)
    stays = np.flatnonzero(result.evicted_at_NLGT[0, 0, 0] == NEVER)
    middle = stays[(stays >= 4) & (stays < 81)]
    assert set(np.diff(middle).tolist()) <= {8, 16}
    assert np.all(middle % 8 == 0)


def test_even_middles_of_several_sizes_are_nested():
    case = make_case(rows=60)
    sets = [kept(case, f"sinkuniform:kept={n}tok,sinks=0,recent=0", 50) for n in range(1, 50)]
    assert all(set(small) < set(large) for small, large in pairwise(sets))


def test_keepodd_keeps_the_newest_odd_positions_and_even_ones_only_after_them():
    case = make_case(rows=30)
    assert kept(case, "keepodd:kept=4tok,at=prompt", 20) == [13, 15, 17, 19]
    assert kept(case, "keepodd:kept=12tok,at=prompt", 20) == [
        1,
        3,
        5,
        7,
        9,
        11,
        13,
        15,
        16,
        17,
        18,
        19,
    ]


@pytest.mark.parametrize("text", ["tova:kept=6tok", "tova:kept=6tok,at=prompt,recent=3"])
def test_tova_keeps_one_set_for_all_heads_of_a_layer(text):
    result = run_family(make_case(rows=40, groups=3, layers=2), [parse(text)], 25)
    one, *others = np.moveaxis(result.evicted_at_NLGT, 2, 0)
    assert all(np.array_equal(one, other) for other in others)
    assert not np.array_equal(one[:, 0], one[:, 1])


def test_tova_keeps_what_the_newest_row_attends_to_and_that_row_itself():
    rows = np.ones((6, 6))
    rows[4] = [0.3, 0.05, 0.4, 0.2, 0.05, 0.0]
    case = one_head(rows)
    assert kept(case, "tova:kept=3tok,at=prompt", 5) == [0, 2, 4]
    assert kept(case, "tova:kept=3tok,at=prompt,recent=0", 5) == [0, 2, 3]


def test_observed_attention_is_a_mean_over_the_rows_that_could_see_a_key_where_h2o_sums():
    rows = [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.5, 0.5, 0.0, 0.0, 0.0],
        [0.4, 0.4, 0.2, 0.0, 0.0],
        [0.1, 0.3, 0.1, 0.5, 0.0],
        [0.2, 0.2, 0.2, 0.2, 0.2],
    ]
    # Sums 2.0 1.2 0.3 0.5; over 4, 3, 2, 1 rows: 0.5 0.4 0.15 0.5, and the newer of two equals wins.
    case = one_head(rows)
    assert kept(case, "h2o:kept=2tok,at=prompt,recent=0", 4) == [0, 1]
    assert kept(case, "observed:kept=2tok", 4) == [0, 3]
    assert kept(case, "observed:kept=1tok", 4) == [3]


def test_persistence_counts_rows_below_an_even_share_within_its_history():
    rows = np.ones((9, 9))
    rows[2:4, 0] = 0.01  # two low rows for key 0, longer ago
    rows[6:8, 1] = 0.01  # two for key 1, of late
    case = one_head(rows)
    text = "scissorhands:kept=7tok,at=prompt,sinks=0,recent=0,history={}"
    assert kept(case, text.format(3), 8) == [0, 2, 3, 4, 5, 6, 7]
    assert kept(case, text.format(6), 8) == [1, 2, 3, 4, 5, 6, 7]  # of two equals the newer stays
    assert kept(case, text.format(3).replace("7tok", "1tok"), 8) == [7]


def test_an_even_share_is_not_low():
    case = make_case(rows=30, spread=0.0)
    found = kept(case, "scissorhands:kept=5tok,at=prompt,sinks=0,recent=0", 25)
    assert found == [20, 21, 22, 23, 24]  # all are equal: the newest


def test_redundancy_prefers_what_is_read_often_then_of_late():
    rows = np.full((13, 13), 1e-3)
    rows[:, 0] = 1.0  # read by every row
    rows[2:6, 2] = 1.0  # read by four rows, long ago
    rows[8:12, 4] = 1.0  # read by four rows, of late
    case = one_head(rows)
    text = "redundancy:kept={}tok,layers=uniform,at=prompt,sinks=0,recent=0,round_tokens=3"
    assert kept(case, text.format(1), 12) == [0]
    assert 4 in kept(case, text.format(2), 12)
    assert 2 in kept(case, text.format(6), 12)


def test_in_deep_layers_only_keys_unread_for_some_rounds_are_candidates_at_first():
    rows = np.full((13, 13), 1e-3)
    rows[1:11, 2] = 1.0  # read by many rows, but not by the newest
    rows[11, 0] = 1.0  # read by the newest alone
    case = one_head(rows)
    text = "redundancy:kept=2tok,layers=uniform,at=prompt,sinks=0,recent=0,round_tokens=1,rounds=1"
    assert kept(case, text, 12) == [0, 2]
    assert kept(case, f"{text},deep_layer={case.layers[0]}", 12) == [0, 11]  # 11 is just written
    assert kept(case, f"{text},deep_layer={case.layers[0] + 1}", 12) == [0, 2]


def test_the_oracle_keeps_what_later_rows_attend_to_most():
    rows = np.ones((8, 8))
    rows[5:, 1], rows[5:, 3] = 9.0, 5.0
    assert kept(one_head(rows), "oracle:kept=2tok", 5) == [1, 3]


def test_the_oracle_of_errors_keeps_the_key_whose_value_matters():
    rows = np.full((6, 6), 1.0)
    rows[4:, 1] = 3.0
    values = np.zeros((6, 6))
    values[2] = 9.0  # of little attention, but far from all others
    case = one_head(rows, values)
    assert kept(case, "oracle:kept=1tok", 4) == [1]
    assert kept(case, "oracle_error:kept=1tok", 4) == [2]


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("sinks", [None, (1.0, -2.0)])
def test_the_oracle_of_errors_loses_the_key_whose_loss_really_costs_least(spread, sinks):
    for seed in range(5):
        case = make_case(layers=1, groups=1, rows=16, spread=spread, sinks=sinks, seed=seed)
        (lost,) = set(range(10)) - set(kept(case, "oracle_error:kept=9tok", 10))
        costs = [cost_without(case, j, 10) for j in range(10)]
        assert lost == int(np.argmin(costs))


def cost_without(case, key, point):
    """Return the squared error of all rows from the point on that a missing key makes."""
    value = case.key_LGTD[0, 0]
    total = 0.0
    for head in range(case.layer.num_heads):
        for t in range(point, case.num_rows):
            outputs = []
            for gone in (None, key):
                seen = [j for j in range(t + 1) if j != gone]
                logits = case.layer.scale * value[seen] @ case.query_LHTD[0, head, t]
                weights = np.exp(logits)
                sink = 0.0 if case.layer.sinks is None else np.exp(case.layer.sinks[head])
                weights /= weights.sum() + sink
                outputs.append(weights @ case.value_LGTD[0, 0, seen])
            total += ((outputs[0] - outputs[1]) ** 2).sum()
    return total


@pytest.mark.parametrize("name", ["oracle", "oracle_error"])
def test_oracles_are_marked_as_no_decoder_could_do_them(name):
    assert not parse(f"{name}:kept=0.5").causal


@pytest.mark.parametrize("name", ["oracle", "oracle_error"])
def test_an_oracle_without_a_later_row_scores_all_alike(name):
    engine = make_engine(make_case(rows=12), [parse(f"{name}:kept=0.5")])
    engine.absorb(*make_case(rows=12).rows(0, 12))
    engine.decide()
    assert engine.held_NLGK[..., 6:].all()  # among equals the newest stay
    assert not engine.held_NLGK[..., :6].any()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("scissorhands:kept=0.5,history=0", "history=0"),
        ("redundancy:kept=0.5,rounds=0", "rounds=0"),
        ("redundancy:kept=0.5,round_tokens=0", "round_tokens=0"),
        ("redundancy:kept=0.5,deep_layer=-2", "deep_layer=-2"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(text, what):
    with pytest.raises(UsageError, match=what):
        parse(text)
