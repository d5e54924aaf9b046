from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles
from tests.kv.cases import cases, make_case, run_family
from tests.kv.test_selectors import BELOW, POINT, policies_of, slow_reader
from tests.oracles_selectors import slow_fetches
from tracekit.errors import UsageError
from tracekit.kv import attend
from tracekit.kv.parse import parse
from tracekit.kv.tier import FastTier, Tier

SELECTED = ["quest:page=3,least=1", "topk", "previous:reduce=max", "topp:mass=0.6"]
TIERS = ["tier:fast=0.3", "tier:fast=5tok", "tier:fast=0.2,replace=lfu", "tier:fast=1tok", "tier"]


def with_tier(below, selected, tier, amounts):
    policies = policies_of(below, selected, amounts)
    return [parse(f"{policy.text}+{tier}") for policy in policies]


@settings(max_examples=60, deadline=None)
@given(
    cases(min_rows=2),
    st.sampled_from(BELOW),
    st.sampled_from(SELECTED),
    st.sampled_from(TIERS),
    st.data(),
)
def test_a_tier_fetches_what_its_slow_twin_fetches(case, below, selected, tier, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = with_tier(below, selected, tier, ["0.25", "6tok"])
    found = run_family(case, policies, point).measures
    fast, heads = policies[0].tier.fast, case.layer.num_kv_heads

    def capacity(num_tokens):
        return max(1, oracles.entries(fast.amount, fast.unit, num_tokens))

    for n, policy in enumerate(policies):
        for at in range(len(case.layers)):
            reader, _, visible = slow_reader(case, at, policy, point)
            slow_GR = [
                slow_fetches(reader, capacity, policy.tier.replace, visible, g)
                for g in range(heads)
            ]
            np.testing.assert_array_equal(found.fetched_NLGR[n, at], slow_GR)


@pytest.mark.parametrize("tier", TIERS)
def test_blocks_of_any_size_fetch_the_same(tier):
    case, policies = make_case(rows=40), with_tier("full", "topk", tier, ["0.1", "0.3"])
    whole = run_family(case, policies, POINT).measures.fetched_NLGR
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend, "BLOCK_BYTES", 3000)
        np.testing.assert_array_equal(
            run_family(case, policies, POINT).measures.fetched_NLGR, whole
        )


@pytest.mark.parametrize("window", [None, 9])
def test_a_fast_tier_that_holds_everything_fetches_nothing(window):
    case = make_case(rows=40, window=window)
    policies = with_tier("full", "topk", "tier:fast=1.0", ["0.1", "1.0"])
    assert not run_family(case, policies, POINT).measures.fetched_NLGR.any()


@pytest.mark.parametrize(
    "text", ["full", "knorm:kept=0.5", "h2o:kept=0.5,every=4", "topk:read=0.2"]
)
def test_nothing_is_fetched_without_a_tier(text):
    measures = run_family(make_case(rows=30), [parse(text)], POINT).measures
    assert measures.fetched_NLGR.shape == measures.read_NLGR.shape
    assert not measures.fetched_NLGR.any()


def test_a_tier_changes_nothing_but_what_is_fetched():
    case = make_case(rows=40)
    with_it, without = (
        run_family(case, [parse(text)], POINT).measures
        for text in ("quest:read=0.3,page=4+tier:fast=0.4", "quest:read=0.3,page=4")
    )
    for name in ("read_NLGR", "held_NLGR", "error_sq_NLHR", "mass_kept_NLHR"):
        np.testing.assert_array_equal(getattr(with_it, name), getattr(without, name))
    assert (with_it.fetched_NLGR < with_it.read_NLGR).all()  # the own entry is at hand
    assert with_it.fetched_NLGR.any()


def test_what_was_read_comes_back_from_the_fast_tier_until_others_push_it_out():
    tier, seen_11111K = FastTier(Tier(fast=parse("topk+tier:fast=3tok").tier.fast)), []
    reads = [{0, 6}, {0, 7}, {1, 8}, {2, 9}, {0, 10}]
    fetched = []
    for row, read in enumerate(reads, start=6):
        position_K = torch.arange(row + 1)
        seen_11111K = torch.ones(1, 1, 1, 1, row + 1, dtype=torch.bool)
        read_11111K = torch.isin(position_K, torch.tensor(list(read))).expand_as(seen_11111K)
        fetched.append(tier.read(read_11111K, seen_11111K, row).item())
    # Fast after each row: 0 5 6, 0 6 7 (0 is a hit), 1 7 8, 2 8 9, 0 9 10.
    assert fetched == [1, 0, 1, 1, 1]


def test_bytes_in_the_tier_and_a_tier_alone_are_refused():
    with pytest.raises(UsageError, match="not bytes"):
        parse("topk:read=0.1+tier:fast=1MiB")
    with pytest.raises(UsageError, match="a tier holds what a selector reads"):
        parse("snapkv:kept=0.3+tier:fast=0.5")


def test_a_policy_with_a_tier_is_read_back_from_its_text():
    for tier in TIERS:
        (policy,) = with_tier("snapkv:kept=0.5", "quest", tier, ["0.1"])
        assert parse(policy.text) == policy
    assert parse("quest:read=0.1+tier").family == "quest+tier"
