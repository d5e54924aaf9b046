"""What comes back of stored entries: against plain loops, and in closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracles_transforms as oracles
from tests.kv.cases import make_case
from tracekit.errors import InputError, UsageError
from tracekit.kv.parse import parse
from tracekit.kv.transform import TRANSFORMS, Entries
from tracekit.kv.transforms.float8 import Float8
from tracekit.kv.transforms.integers import Int2, Int4, Int8
from tracekit.kv.transforms.lowrank import LowRank, Rank
from tracekit.kv.view import View
from tracekit.spec import RopeSpec

ROPE = RopeSpec(kind="yarn", theta=1e4, inv_freq=(1.0, 0.1), attention_scaling=1.5, layout="halves")


def entries(
    *, heads: int = 3, count: int = 12, size: int = 6, seed: int = 0, spread: float = 1.0
) -> Entries:
    draw = np.random.default_rng(seed)
    key, value = (torch.tensor(spread * draw.normal(size=(heads, count, size))) for _ in "kv")
    return Entries(key, value, torch.arange(count).expand(heads, -1) * 2)


def assert_like_slow(store: oracles.Store, transform, given_entries: Entries, atol: float = 0.0):
    found = transform.store(given_entries)
    for x in range(len(given_entries.key_XCD)):
        rows = (list(array[x].numpy()) for array in given_entries[:2])
        true = store(*rows, given_entries.position_XC[x].tolist())
        for one, other in zip(found, true, strict=True):
            np.testing.assert_allclose(one[x].numpy(), np.array(other), atol=atol, rtol=0)


@given(
    st.sampled_from([Int8, Int4, Int2]),
    st.sampled_from(["channel", "token"]),
    st.sampled_from(["channel", "token"]),
    st.sampled_from([1, 2, 4, 12]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 100.0, 1e5]),
)
def test_integers_equal_their_slow_twin(cls, key, value, group, seed, spread):
    transform = cls(key=key, value=value, group=group)
    store = oracles.integers(transform.bits, key, value, group)
    assert_like_slow(store, transform, entries(seed=seed, spread=spread))


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-4, 1.0, 300.0, 1e9]))
def test_8_bit_floats_equal_their_slow_twin(seed, spread):
    assert_like_slow(oracles.floats(), Float8(), entries(seed=seed, spread=spread))


@pytest.mark.parametrize("cls", [Int8, Int4, Int2])
@pytest.mark.parametrize("along", ["channel", "token"])
def test_a_number_is_off_by_half_a_scale_and_the_rounding_of_scale_and_zero_point(cls, along):
    given_entries = entries(count=64, size=64, spread=3.0)
    transform = cls(key=along, value=along, group=64)
    most, dim = 2**transform.bits - 1, {"channel": 1, "token": 2}[along]
    for x, back in zip(given_entries[:2], transform.store(given_entries), strict=True):
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        half_float16 = 2.0**-11
        bound = (high - low) / most / 2 + half_float16 * (low.abs() + (high - low)) * 1.01
        assert ((back - x).abs() <= bound).all()


def test_small_integers_are_stored_exactly_in_8_bits():
    draw = np.random.default_rng(0)
    key = torch.tensor(draw.integers(-128, 128, size=(2, 32, 8)).astype(float))
    key[:, 0], key[:, 1] = -128, 127
    transform = Int8(key="channel", value="channel")
    for dtype in (torch.float32, torch.float64):
        back = transform.store(
            Entries(key.to(dtype), key.to(dtype), torch.arange(32).expand(2, -1))
        )
        assert all(torch.equal(one, key.to(dtype)) for one in back)
        assert back[0].dtype == dtype


@pytest.mark.parametrize("transform", [Int8(group=4), Int4(group=4), Int2(group=4), Float8()])
@pytest.mark.parametrize("number", [0.0, 0.5, -3.0, 256.0])
def test_a_group_whose_numbers_are_alike_comes_back_as_it_was(transform, number):
    key = torch.full((2, 4, 4), number)
    back = transform.store(Entries(key, key, torch.arange(4).expand(2, -1)))
    assert all(torch.equal(one, key) for one in back)


@pytest.mark.parametrize("transform", [Int8(group=4), Int4(group=4), Int2(group=4), Float8()])
def test_infinite_numbers_and_numbers_beyond_the_range_come_back_finite(transform):
    key = entries(count=4, size=4).key_XCD
    key[0, 0], key[0, 1], key[1, 2, 3], key[2] = torch.inf, -torch.inf, torch.inf, 1e30
    for back in transform.store(Entries(key, -key, torch.arange(4).expand(3, -1))):
        assert back.isfinite().all()


def fitted(transform: LowRank, key_LGTD: np.ndarray, value_LGTD: np.ndarray, rope) -> Entries:
    """Return all rows as entries, stacked heads first, with the basis that they give."""
    key, value = torch.tensor(key_LGTD), torch.tensor(value_LGTD)
    num_layers, num_groups, num_rows = key.shape[:3]
    view = View(
        layer=make_case(groups=num_groups).layer,
        layers=tuple(range(num_layers)),
        seed=0,
        held_NLGK=torch.ones(1, num_layers, num_groups, num_rows, dtype=torch.bool),
        keys=key,
        values=value,
        rope=rope,
    )
    position = torch.arange(num_rows).expand(num_layers * num_groups, -1)
    return Entries(key.flatten(0, 1), value.flatten(0, 1), position, transform.fit(view), rope)


@pytest.mark.parametrize("rope", [None, ROPE, replace(ROPE, layout="neighbours")])
@pytest.mark.parametrize("basis", ["head", "layer"])
def test_low_rank_equals_singular_vectors_head_by_head(rope, basis):
    key, value = (np.random.default_rng(seed).normal(size=(2, 3, 20, 6)) for seed in (0, 1))
    transform = LowRank(rank=Rank(2), basis=basis)
    stored = fitted(transform, key, value, rope)
    for layer in range(2):
        for g in range(3):
            heads = slice(g, g + 1) if basis == "head" else slice(None)
            store = oracles.low_rank(key[layer, heads], value[layer, heads], 2, rope)
            x = slice(3 * layer + g, 3 * layer + g + 1)
            one = Entries(*(a[x] for a in stored[:3]), tuple(b[x] for b in stored.fitted), rope)
            assert_like_slow(store, transform, one, atol=1e-12)


@pytest.mark.parametrize("rank", [Rank(6), Rank(99)])
@pytest.mark.parametrize("num_rows", [2, 20])
def test_a_full_rank_gives_the_entries_back(rank, num_rows):
    key, value = (np.random.default_rng(seed).normal(size=(1, 2, num_rows, 6)) for seed in (0, 1))
    transform = LowRank(rank=rank)
    stored = fitted(transform, key, value, ROPE)
    back = transform.store(stored)
    torch.testing.assert_close(back[0], stored.key_XCD, atol=1e-12, rtol=0)
    torch.testing.assert_close(back[1], stored.value_XCD, atol=1e-12, rtol=0)


def test_no_basis_of_its_size_is_nearer_to_the_prompt():
    key, value = (np.random.default_rng(seed).normal(size=(1, 1, 40, 6)) for seed in (0, 1))
    transform = LowRank(rank=Rank(3))
    stored = fitted(transform, key, value, ROPE)
    error = ((transform.store(stored)[1] - stored.value_XCD) ** 2).sum()
    singular = np.linalg.svd(value[0, 0], compute_uv=False)
    assert float(error) == pytest.approx((singular[3:] ** 2).sum())


def test_rows_that_are_not_finite_are_refused_by_layer():
    key, value = (np.random.default_rng(seed).normal(size=(2, 1, 8, 6)) for seed in (0, 1))
    key[1, 0, 3, 2] = np.inf
    with pytest.raises(InputError, match="no basis in layer 1"):
        fitted(LowRank(), key, value, None)


@pytest.mark.parametrize("rope", [replace(ROPE, layout=None), replace(ROPE, kind="dynamic")])
def test_low_rank_is_refused_where_the_rotary_embedding_cannot_be_undone(rope):
    key = np.random.default_rng(0).normal(size=(1, 1, 8, 6))
    with pytest.raises(UsageError, match="rotary embedding"):
        fitted(LowRank(), key, key, rope)


LAYER = replace(make_case().layer, num_kv_heads=2, head_dim=64, value_dim=96)


@pytest.mark.parametrize(
    ("text", "entry_bytes", "fixed_bytes"),
    [
        ("int8", (64 + 64 * 4 / 32) + (96 + 3 * 4), 0),
        ("int4", (32 + 64 * 4 / 32) + (48 + 3 * 4), 0),
        ("int2:group=64", (16 + 64 * 4 / 64) + (24 + 2 * 4), 0),
        ("int4:key=token,value=channel,group=16", (32 + 4 * 4) + (48 + 96 * 4 / 16), 0),
        ("fp8", 64 + 96, 0),
        ("lowrank", 2 * (16 + 24), 2 * (16 * 64 + 24 * 96)),
        ("lowrank:rank=8,basis=layer", 2 * (8 + 8), 2 * (8 * 64 + 8 * 96) / 2),
        ("lowrank:rank=70", 2 * (64 + 70), 2 * (64 * 64 + 70 * 96)),
    ],
)
def test_bytes_count_codes_scales_zero_points_and_bases(text, entry_bytes, fixed_bytes):
    transform = parse(text).transform
    assert transform.entry_bytes(LAYER, 2) == pytest.approx(entry_bytes)
    assert transform.fixed_bytes(LAYER, 2) == pytest.approx(fixed_bytes)


@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_a_transform_is_read_back_from_its_text_and_says_in_a_sentence_what_it_does(name):
    policy = parse(name)
    assert policy.family == name
    assert parse(policy.text) == policy
    assert (TRANSFORMS.get(name).__doc__ or "").split("\n\n")[0].endswith(".")
    assert policy.transform.num_together >= 1
    assert policy.transform.residual >= 0


@pytest.mark.parametrize(("text", "rank"), [("lowrank:rank=16", "16"), ("lowrank:rank=0.5", "0.5")])
def test_a_rank_is_written_as_it_was_given(text, rank):
    assert parse(text).family == text
    assert f"rank={rank}," in parse(text).text
    assert parse(text) == replace(parse("lowrank"), transform=LowRank(rank=float(rank)))


@pytest.mark.parametrize(
    "text",
    [
        "int4:group=0",
        "int8:residual=-1",
        "int8:key=head",
        "fp8:residual=-1",
        "lowrank:rank=0",
        "lowrank:rank=1.5",
        "lowrank:rank=-2",
        "lowrank:rank=nan",
        "lowrank:rank=many",
        "lowrank:residual=-1",
    ],
)
def test_parameters_out_of_range_are_refused(text):
    with pytest.raises(UsageError, match=text):
        parse(text)
