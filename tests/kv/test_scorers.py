from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kv.cases import SEED, make_case, run_family
from tracekit.kv.parse import parse
from tracekit.kv.schedule import Spans
from tracekit.kv.scorers.random import Random
from tracekit.kv.view import View
from tracekit.spec import LayerSpec

LAYER = LayerSpec(index=0, kind="full", num_heads=4, num_kv_heads=2, head_dim=4, value_dim=4)


def draws(num_tokens, *, seed=SEED, layers=(0, 5)):
    held = torch.ones(1, len(layers), 2, num_tokens, dtype=torch.bool)
    return Random().score(View(layer=LAYER, layers=layers, seed=seed, held_NLGK=held))[0]


def test_the_draw_of_a_key_depends_on_nothing_but_seed_layer_head_and_position():
    many = draws(1000)
    assert torch.equal(draws(10), many[..., :10])
    assert torch.equal(draws(1000, layers=(5,))[0], many[1])
    assert not torch.equal(draws(1000, seed=SEED + 1), many)
    assert not torch.equal(many[0], many[1])
    assert not torch.equal(many[:, 0], many[:, 1])


def test_draws_are_even_and_heads_are_unrelated():
    many = draws(20_000).flatten(0, 1).numpy()
    assert many.min() >= 0
    assert many.max() < 1
    np.testing.assert_allclose(many.mean(1), 0.5, atol=0.01)
    np.testing.assert_allclose(many.var(1), 1 / 12, atol=0.005)
    np.testing.assert_allclose(np.corrcoef(many), np.eye(4), atol=0.03)


def test_any_seed_can_be_used():
    for seed in (-1, 0, 2**63, 2**70):
        assert torch.isfinite(draws(5, seed=seed)).all()


def kept(text, **spec):
    case = make_case(rows=60, groups=2, group_size=3, **spec)
    return run_family(case, [parse(text)], 50)


def test_with_averages_the_order_of_pool_and_group_does_not_matter_and_with_maxima_it_does():
    text = "snapkv:kept=0.5,window=4,pool={},order={}"
    for pool, same in (("avg", True), ("max", False)):
        one, two = (kept(text.format(pool, order)) for order in ("pool_group", "group_pool"))
        assert np.array_equal(one.evicted_at_NLGT, two.evicted_at_NLGT) is same


def test_mean_and_sum_keep_the_same_keys_and_the_maximum_others():
    mean, total, most = (kept(f"h2o:kept=0.5,reduce={how}") for how in ("mean", "sum", "max"))
    assert np.array_equal(mean.evicted_at_NLGT, total.evicted_at_NLGT)
    assert not np.array_equal(mean.evicted_at_NLGT, most.evicted_at_NLGT)


def test_streaming_keeps_four_sinks_and_the_newest():
    result = kept("streaming:kept=10tok")
    stays = np.flatnonzero(result.evicted_at_NLGT[0, 0, 0, :50] > 50)
    assert stays.tolist() == [0, 1, 2, 3, *range(44, 50)]


@pytest.mark.parametrize("text", ["h2o:kept=8tok", "h2o:kept=8tok,every=3"])
def test_h2o_keeps_the_newest_half_of_its_budget(text):
    result = kept(text)
    for t in parse(text).schedule.decisions(50, Spans(num_tokens=61)):
        assert (result.evicted_at_NLGT[..., t - 4 : t] > t).all()
