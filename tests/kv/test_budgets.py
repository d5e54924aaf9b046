from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.cases import (
    KEPT,
    allot,
    assert_kept_sets_shrink_to_the_budget,
    assert_like_slow,
    cases,
    family,
    make_case,
    run_family,
    shares_of,
)
from tests.kv.twins.budgets import TEXTS
from tracekit.errors import InputError, UsageError
from tracekit.kv.allotment import share_out
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS, Cache
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.plan import make_shares, observe
from tracekit.spec import LayerSpec


def stack(num_layers=4, groups=2, **spec):
    layer = LayerSpec(
        index=0, kind="full", num_heads=4, num_kv_heads=groups, head_dim=4, value_dim=4, **spec
    )
    return Cache(tuple(replace(layer, index=index) for index in range(num_layers)))


def entries(text, budget, num_tokens, cache, observed=()):
    """Return the entries of each layer's first head, a head budget left aside."""
    plan = parse(text).layers.plan(cache, budget, num_tokens, observed)
    return [row.tolist() for row in share_out(plan, budget, num_tokens, cache)]


@settings(max_examples=60, deadline=None)
@given(cases(min_rows=2), st.sampled_from(TEXTS), KEPT, st.data())
def test_a_replay_with_a_budget_equals_its_slow_twin(case, text, kept, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    policies = family(text, kept)
    result = run_family(case, policies, point)
    for n, policy in enumerate(policies):
        assert_like_slow(case, policy, n, result)


@settings(max_examples=60, deadline=None)
@given(cases(min_rows=2), st.sampled_from(TEXTS), KEPT, st.data())
def test_whatever_is_shared_out_the_sum_is_that_of_uniform(case, text, kept, data):
    """Law 2."""
    point = data.draw(st.integers(1, case.num_rows - 1))
    assert_kept_sets_shrink_to_the_budget(case, family(text, kept), point)


@pytest.mark.parametrize("registry", [LAYER_BUDGETS, HEAD_BUDGETS], ids=["layers", "heads"])
def test_a_budget_says_in_a_sentence_what_it_does(registry):
    for name in registry.names():
        assert (registry.get(name).__doc__ or "").split("\n\n")[0].endswith(".")


def kvpress_pyramid(budget, num_tokens, window, beta, num_layers):
    """Lines of kvpress 0.5.5, pyramidkv_press.py, for n (1 - r) = budget."""
    capacity = window + budget
    low = (capacity - window) / beta
    high = (capacity - window) * 2 - low
    if high >= num_tokens - window:
        high = num_tokens - window
        low = (capacity - window) * 2 - high
    if not num_tokens >= high >= low >= window:
        return [max(1, round(budget))] * num_layers
    step = (high - low) / (num_layers - 1) if num_layers > 1 else 0
    return [round(high - layer * step) for layer in range(num_layers)]


@given(
    st.integers(1, 400),
    st.integers(0, 64),
    st.sampled_from([1.0, 2.0, 7.0, 20.0]),
    st.integers(2, 33),
    st.data(),
)
def test_pyramid_gives_the_numbers_of_kvpress(num_tokens, window, beta, num_layers, data):
    budget = data.draw(st.integers(1, num_tokens))
    found = entries(
        f"pyramidkv:pyramid_window={window},beta={beta}",
        budget,
        num_tokens,
        stack(num_layers),
    )
    theirs = kvpress_pyramid(budget, num_tokens, window, beta, num_layers)
    if min(theirs) >= 1:
        # Ours add up to what even layers would hold; kvpress rounds each layer by itself.
        most = 0 if sum(theirs) == budget * num_layers else 1
        assert all(abs(ours[0] - one) <= most for ours, one in zip(found, theirs, strict=True))


def test_pyramid_falls_from_the_first_layer_to_the_last():
    found = entries("pyramidkv:pyramid_window=4", 100, 1000, stack(5))
    assert [row[0] for row in found] == [195, 148, 100, 52, 5]
    assert entries("pyramidkv:pyramid_window=6", 100, 1000, stack(5)) == [[100, 100]] * 5


def kvpress_adaptive(score_GK, budget, safeguard):
    """Lines of kvpress 0.5.5, adakv_press.py: the mask of what stays."""
    num_heads, num_keys = score_GK.shape
    score_GK = score_GK.clone()
    safe = max(1, int(budget * safeguard))
    top = score_GK.topk(safe, dim=-1).indices
    score_GK.scatter_(-1, top, torch.finfo(score_GK.dtype).max)
    gone = score_GK.flatten().topk(num_heads * (num_keys - budget), largest=False).indices
    kept = torch.ones(num_heads * num_keys, dtype=torch.bool)
    kept[gone] = False
    return kept.reshape(num_heads, num_keys)


@pytest.mark.parametrize("kept", ["1tok", "3tok", "0.25", "0.5", "0.9"])
@pytest.mark.parametrize("safeguard", [0.0, 0.2, 0.7, 1.0])
def test_adaptive_heads_keep_what_kvpress_keeps(kept, safeguard):
    case, point = make_case(groups=3, group_size=1, rows=40, layers=2), 36
    (policy,) = family(f"knorm:heads=adaptive,safeguard={safeguard}", [kept])
    result = run_family(case, [policy], point)
    for at in range(2):
        score_GK = -torch.tensor(case.key_LGTD[at, :, :point]).norm(dim=-1).float()
        theirs = kvpress_adaptive(score_GK, policy.kept.of(point), safeguard)
        stays = result.evicted_at_NLGT[0, at, :, :point] == NEVER
        np.testing.assert_array_equal(stays, theirs)


def test_tiers_keep_their_floors_where_the_total_allows_them():
    found = entries("knorm:layers=tiers", 50, 100, stack(6))
    assert [row[0] for row in found] == [40, 40, 40, 40, 70, 70]
    # Floors of 20.2 and 70.7 are rounded up.
    found = entries("knorm:layers=tiers", 38, 101, stack(6))
    assert [row[0] for row in found] == [22, 22, 21, 21, 71, 71]
    assert entries("knorm:layers=tiers", 90, 100, stack(6)) == [[90, 90]] * 6


def test_tiers_that_the_total_does_not_allow_are_scaled():
    found = entries("knorm:layers=tiers,deep_from=0.5", 9, 100, stack(2))
    assert [row[0] for row in found] == [4, 14]
    # A single layer is shallow.
    assert entries("knorm:layers=tiers", 9, 100, stack(1)) == [[9, 9]]


def test_cake_gives_more_to_spread_and_changing_attention():
    observed = [torch.tensor(one, dtype=torch.float64) for one in ([4, 1], [4, 4], [2, 4])]
    text = "cake:tau1=1,tau2=2"
    plan = parse(text).layers.plan(stack(3), 50, 1000, observed)
    np.testing.assert_allclose([row[0] for row in plan], [0.5, 1.0, 0.5])
    even = [torch.zeros(2, dtype=torch.float64)] * 3
    assert entries(text, 50, 1000, stack(3), even) == [[50, 50]] * 3


def test_zigzag_counts_the_fewest_keys_of_a_mass():
    case = make_case(rows=20, spread=0.0, layers=1)
    (policy,) = family("zigzagkv:zigzag_window=1,zigzag_mass=0.9", ["0.5"])
    # 10 keys of 0.1 each: 9 of them are 0.9, whatever the rounding.
    found = observe(policy, case.reference, case.setting(10))
    assert found.tolist() == [9.0]


def test_lazy_layers_keep_their_ends_and_the_others_share_the_rest():
    observed = [torch.tensor(mass, dtype=torch.float64) for mass in (0.95, 0.3, 0.91, 0.9)]
    text = "simlayerkv:lazy_recent=16"
    found = entries(text, 50, 1000, stack(4), observed)
    assert [row[0] for row in found] == [20, 80, 20, 80]
    # What the others cannot use goes back.
    found = entries(text, 50, 60, stack(4), observed)
    assert [row[0] for row in found] == [40, 60, 40, 60]
    for all_alike in ([observed[0]] * 4, [observed[1]] * 4):
        assert entries(text, 50, 1000, stack(4), all_alike) == [[50, 50]] * 4


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return str(path)


NUMBERS = [[0.0, 1.0], [3.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("heads.json", json.dumps(NUMBERS)),
        ("heads.json", json.dumps({str(at): row for at, row in enumerate(NUMBERS)})),
        ("heads.tsv", "\n".join("\t".join(map(str, row)) for row in NUMBERS)),
        ("heads.txt", "# layer 0 first\n0 1\n\n3 0  # two\n2 2\n0 0\n"),
    ],
)
def test_heads_get_a_floor_and_their_part_of_the_rest(tmp_path, name, text):
    path = write(tmp_path, name, text)
    found = entries(f"headkv:file={path},head_floor=0.2", 100, 1000, stack(4))
    assert found == [[20, 100], [260, 20], [180, 180], [20, 20]]
    found = entries(f"headkv:file={path},head_floor=0", 10, 1000, stack(4))
    assert sum(map(sum, found)) == 80
    assert found[3] == [1, 1]


def test_retrieval_heads_get_everything_in_order_until_the_bytes_are_spent(tmp_path):
    path = write(tmp_path, "heads.json", json.dumps(NUMBERS))
    found = entries(f"duoattention:file={path},stream=10", 30, 80, stack(4))
    # 240 entries: 80 for the streams, 70 each for two heads, the last 20 for the next in order.
    assert found == [[10, 10], [80, 10], [80, 30], [10, 10]]
    assert entries(f"duoattention:file={path},stream=40", 30, 80, stack(4)) == [[30, 30]] * 4


@pytest.mark.parametrize("preset", ["headkv", "duoattention"])
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "[[1, 2], [3, 4]]", r"has 2 rows: write one for each of the 4 layers"),
        ("a.json", "[[1, 2], [3, 4], [5], [6, 7]]", r"layer 2, has 1 numbers: write one for each"),
        ("a.json", "[[1, 2], [3, 4], [5, 6], [1, 2, 3, 4]]", r"layer 3, .*\(those are query heads"),
        ("a.json", '[[1, 2], [3, "x"], [5, 6], [7, 8]]', r"layer 1, has 'x' for KV head 1 of"),
        ("a.json", "[[1, 2], [3, null], [5, 6], [7, 8]]", r"layer 1, has None for KV head 1"),
        ("a.json", "[[1, 2], [3, NaN], [5, 6], [7, 8]]", r"layer 1, has nan for KV head 1"),
        ("a.json", "[[1, 2], [3, 1e999], [5, 6], [7, 8]]", r"layer 1, has inf for KV head 1"),
        ("a.json", "[1, 2, 3, 4]", r"no list of numbers for layer 0"),
        ("a.json", '{"0": [1, 2], "1": [3, 4], "2": [5, 6]}', r"no list of numbers for layer 3"),
        ("a.json", "7", r"has 0 rows"),
        ("a.json", "[[1, 2", r"is no JSON"),
        ("a.tsv", "1\t2\n3\tx\n5\t6\n7\t8", r"line 2, has 'x' for KV head 1 of layer 1: write"),
        ("a.tsv", "1\t2\n\n3\n5\t6\n7\t8", r"line 3, has 1 numbers: .* 2 KV heads of layer 1"),
        ("a.tsv", "1 2\n3 4\n5 6\n7 8\n9 9", r"has 5 rows"),
        ("a.tsv", "", r"has 0 rows"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_place(tmp_path, preset, name, text, words):
    path = write(tmp_path, name, text)
    with pytest.raises(InputError, match=words) as caught:
        entries(f"{preset}:file={path}", 10, 100, stack(4))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_that_are_no_worth_are_refused(tmp_path):
    negative = write(tmp_path, "a.tsv", "1 2\n3 -4\n5 6\n7 8")
    with pytest.raises(InputError, match=r"line 2, has '-4' for KV head 1 .* number from 0 on"):
        entries(f"headkv:file={negative}", 10, 100, stack(4))
    assert entries(f"duoattention:file={negative},stream=5", 10, 100, stack(4))[1] == [5, 5]
    nothing = write(tmp_path, "b.tsv", "0 0\n" * 4)
    with pytest.raises(InputError, match="no number above 0"):
        entries(f"headkv:file={nothing}", 10, 100, stack(4))


@pytest.mark.parametrize("name", ["headkv", "duoattention"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(UsageError, match="file= is missing"):
        entries(name, 10, 100, stack(4))
    with pytest.raises(InputError, match=r"nowhere.json cannot be read"):
        entries(f"{name}:file={tmp_path}/nowhere.json", 10, 100, stack(4))
    write(tmp_path, "bytes.tsv", "")
    (tmp_path / "bytes.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"bytes.tsv cannot be read"):
        entries(f"{name}:file={tmp_path}/bytes.tsv", 10, 100, stack(4))


@pytest.mark.parametrize(
    "text",
    [
        "adakv:safeguard=1.5",
        "pyramidkv:beta=0.5",
        "pyramidkv:pyramid_window=-1",
        "knorm:layers=tiers,deep=1.2",
        "cake:tau1=0",
        "cake:cake_window=0",
        "zigzagkv:zigzag_mass=0",
        "simlayerkv:lazy_threshold=2",
        "simlayerkv:lazy_recent=0",
        "headkv:head_floor=-0.1",
        "duoattention:stream=0",
    ],
)
def test_a_parameter_out_of_its_range_is_named(text):
    name = text.split(":")[1].split(",")[-1].split("=")[0]
    with pytest.raises(UsageError, match=f"{name}"):
        parse(text)


def test_a_plan_is_made_over_all_layers_and_frozen_at_the_first_decision():
    case = make_case(rows=40, layers=3)
    policies = family("cake:window=3,cake_window=4,every=5", ["0.3"])
    parts = [case.part(at) for at in range(3)]
    setting = case.setting(20)
    observed = [
        observe(policies[0], part.reference, replace(setting, layers=(number,)))
        for part, number in zip(parts, case.layers, strict=True)
    ]
    alone = make_shares(policies, observed, setting)
    together = shares_of(case, policies, 20, case.reference)
    for one, other in zip(alone[0], together[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    later = case.with_noise_from(20)
    assert torch.equal(
        allot(case, policies, 20).entries(35, case.layers),
        allot(later, policies, 20).entries(35, case.layers),
    )


def test_bytes_are_shared_out_like_tokens():
    case = make_case(rows=40, layers=3)
    # An entry of all heads of all layers is 2 heads x 8 numbers x 2 bytes x 3 layers = 96 bytes.
    for kept, tokens in (("700B", "7tok"), ("1kB", "10tok"), ("1B", "1tok")):
        text = "adapyramid:window=2,pyramid_window=0,every=4"
        one, other = (run_family(case, family(text, [each]), 30) for each in (kept, tokens))
        np.testing.assert_array_equal(one.evicted_at_NLGT, other.evicted_at_NLGT)


def test_a_plan_that_was_not_shown_all_layers_is_refused():
    case = make_case(layers=3)
    (policy,) = family("cake:window=3", ["0.3"])
    setting = case.setting(12)
    observed = observe(policy, case.reference, setting)
    with pytest.raises(UsageError, match=r"all 3 layers that hold keys, but 2 were observed"):
        make_shares([policy], [observed[:2]], setting)


def test_layers_without_numbers_are_named():
    case = make_case(layers=3)
    case.key_LGTD[1, 1, 5] = np.nan
    (policy,) = family("zigzagkv:window=3", ["0.3"])
    (cake,) = family("cake:window=3,cake_window=4", ["0.3"])
    with pytest.raises(InputError, match=r"layers=cake has no number for layer 4"):
        run_family(case, [cake], 12)
    with pytest.raises(InputError):
        run_family(case, [policy], 12)


def test_keys_at_their_place_in_the_cache_need_heads_of_one_length():
    case = make_case(rows=30, layers=4)
    with pytest.raises(UsageError, match="heads of one length"):
        parse("adakv:kept=0.3,positions=cache")
    policies = family("pyramidkv:window=2,pyramid_window=0,positions=cache", ["0.3"])
    assert run_family(case, policies, 20) is not None
    policies = family("headkv:window=2,positions=cache", ["0.3"])
    with pytest.raises(UsageError, match="heads of one length"):
        run_family(case, policies, 20)
