from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracles, oracles_selectors
from tests.kv.cases import TWINS, cases, make_case, make_engine, run_family
from tracekit.errors import UsageError
from tracekit.kv import attend, pages
from tracekit.kv.amounts import Frac, Tokens, parse_kept
from tracekit.kv.parse import parse
from tracekit.kv.selector import SELECTORS, Selector

NAMES = SELECTORS.names()
POINT = 20
CHOICES = {
    "quest": lambda one: oracles_selectors.quest(one.page, one.least, one.reduce),
    "shadowkv": lambda one: oracles_selectors.shadowkv(
        one.chunk, one.local, one.outliers, one.reduce
    ),
    "doublesparse": lambda one: oracles_selectors.doublesparse(one.channels, one.heavy, one.reduce),
    "previous": lambda one: oracles_selectors.previous(one.reduce),
    "topk": lambda one: oracles_selectors.topk(one.reduce),
    "topp": lambda one: oracles_selectors.topp(one.mass, one.reduce),
}
"""By selector: from its parameters to the slow choice."""

SELECTED = [
    "quest:page=3,least=1",
    "quest:page=4,least=2,reduce=mean",
    "quest",
    "shadowkv:chunk=2,local=1,outliers=0.5",
    "shadowkv:chunk=3,local=0,outliers=0.3,reduce=mean",
    "shadowkv",
    "doublesparse:channels=1",
    "doublesparse:channels=2,heavy=key,reduce=max",
    "doublesparse",
    "previous",
    "previous:reduce=max",
    "topk",
    "topk:reduce=max",
    "topp:mass=0.5",
    "topp:mass=0.9,reduce=max",
    "topp:mass=1.0",
]
BELOW = ["full", "knorm:kept=0.6", "streaming:kept=9tok", "h2o:kept=0.5,every=3", "random:kept=0.4"]
READ = ["0.05", "0.25", "0.5", "1.0", "1tok", "7tok", "60tok"]


def policies_of(below, selected, amounts):
    """Return one policy an amount; a selector that takes none gives one policy."""
    policy = parse(f"{below}+{selected}")
    if not policy.selector.takes_amount:
        return [policy]
    reads = [parse_kept(one) for one in amounts]
    return [replace(policy, selector=replace(policy.selector, read=one)) for one in reads]


def slow_reader(case, at, policy, point):
    """Run the twin on layer number ``at``; return it and, by row and KV head, what was visible."""
    layer, selector = replace(case.layer, index=case.layers[at]), policy.selector
    read = selector.read or Frac(1.0)
    reader = oracles_selectors.SlowReader(
        layer,
        *(array[at] for array in case.arrays),
        first_decision=point,
        budgets=[
            max(1, oracles.entries(read.amount, read.unit, t + 1)) for t in range(case.num_rows)
        ],
    )
    choose = CHOICES[SELECTORS.name_of(type(selector))](selector)
    scores, protection = TWINS[policy.name](policy.scorer), policy.protection
    due, heads = policy.schedule.decisions(point, case.spans()), layer.num_kv_heads
    outputs, visible = [], []
    for t in range(case.num_rows):
        if t in due:
            budget = max(1, oracles.entries(policy.kept.amount, policy.kept.unit, t))
            recent = oracles.entries(protection.recent.amount, protection.recent.unit, budget)
            reader.decide(scores, [budget] * heads, protection.sinks, [recent] * heads)
            reader.choose = choose
        outputs.append(reader.step())
        visible.append([set(keys) for keys in reader.held])
    return reader, np.array(outputs[point:]).swapaxes(0, 1), visible


@dataclass(frozen=True)
class Rows:
    """Outputs [N, L, H, R, D], and by row what was read, bool [N, L, G, K]."""

    output_NLHRD: torch.Tensor
    read: list[torch.Tensor]


def run(case, policies, point, *, one_by_one=False, dtype=torch.float64):
    """Call the engine, in blocks or one row at a time."""
    engine = make_engine(case, policies)
    engine.absorb(*case.rows(0, point, dtype))
    due = policies[0].schedule.decisions(point, case.spans())
    stops = [*due, case.num_rows]
    outputs, read, at = [], [], point
    while at < case.num_rows:
        if at in due:
            engine.decide()
        stop = min([one for one in stops if one > at], default=case.num_rows)
        stop = at + 1 if one_by_one else min(stop, at + engine.room)
        for output, outcome in engine.read(*case.rows(at, stop, dtype)):
            outputs.append(output)
            read += outcome.seen_NLGQK.unbind(3)
        at = stop
    return Rows(torch.cat(outputs, dim=-2), read)


def assert_like_slow(case, policies, point):
    found = run(case, policies, point)
    size = 1 + np.abs(case.value_LGTD).max()
    for n, policy in enumerate(policies):
        for at in range(len(case.layers)):
            reader, output_HRD, _ = slow_reader(case, at, policy, point)
            for t in range(point, case.num_rows):
                for g in range(case.layer.num_kv_heads):
                    read_K = found.read[t - point][n, at, g]
                    assert set(read_K.nonzero()[:, 0].tolist()) == reader.read[t][g], (t, g)
            close = found.output_NLHRD[n, at].numpy() / size
            np.testing.assert_allclose(close, output_HRD / size, atol=1e-9, rtol=0)


@settings(max_examples=80, deadline=None)
@given(
    cases(min_rows=2),
    st.sampled_from(BELOW),
    st.sampled_from(SELECTED),
    st.lists(st.sampled_from(READ), min_size=1, max_size=3),
    st.data(),
)
def test_a_selector_reads_what_its_slow_twin_reads(case, below, selected, amounts, data):
    point = data.draw(st.integers(1, case.num_rows - 1))
    assert_like_slow(case, policies_of(below, selected, amounts), point)


@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize("spec", [{}, {"window": 14, "softcap": 5.0}, {"sinks": (0.0, 2.0, 1.0)}])
def test_a_selector_on_a_longer_text_reads_what_its_slow_twin_reads(selected, spec):
    groups, group_size = (3, 1) if spec else (2, 2)
    case = make_case(rows=36, groups=groups, group_size=group_size, **spec)
    below = "h2o:kept=0.7,every=5" if spec else "full"
    assert_like_slow(case, policies_of(below, selected, ["0.1", "0.5", "9tok"]), 26)


@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize("below", ["full", "h2o:kept=0.5,every=4"])
def test_blocks_of_any_size_read_the_same(selected, below):
    case, policies = make_case(rows=32), policies_of(below, selected, ["0.2", "0.6"])
    whole = run(case, policies, POINT)
    with pytest.MonkeyPatch.context() as patch:
        for module in (attend, pages):
            patch.setattr(module, "BLOCK_BYTES", 3000)
        blocks = run(case, policies, POINT)
    single = run(case, policies, POINT, one_by_one=True)
    for other in (blocks, single):
        for one, two in zip(whole.read, other.read, strict=True):
            num_keys = min(one.shape[-1], two.shape[-1])
            assert torch.equal(one[..., :num_keys], two[..., :num_keys])
            assert not one[..., num_keys:].any()
        torch.testing.assert_close(whole.output_NLHRD, other.output_NLHRD, atol=1e-12, rtol=0)


@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize("stacked", ["full+int4:group=4", "streaming:kept=0.6,positions=cache"])
def test_stored_or_turned_keys_are_chosen_from_as_each_row_finds_them(selected, stacked):
    case, (policy, *_) = make_case(rows=34, size=8), policies_of(stacked, selected, ["0.4"])
    whole, single = (run(case, [policy], POINT, one_by_one=one) for one in (False, True))
    torch.testing.assert_close(whole.output_NLHRD, single.output_NLHRD, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [one for one in NAMES if SELECTORS.get(one).takes_amount])
@pytest.mark.parametrize("below", ["full", "snapkv:kept=0.5,window=3", "h2o:kept=0.4,every=2"])
@pytest.mark.parametrize("spec", [{}, {"window": 9}, {"sinks": (1.0, 0.0, 2.0, 3.0)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_read_everything_gives_the_bits_of_no_selector(name, below, spec, dtype):
    case = make_case(rows=40, **spec)
    policy = parse(f"{below}+{name}:read=1.0")
    read, all_of_it = (
        run(case, [one], POINT, dtype=dtype) for one in (policy, replace(policy, selector=None))
    )
    assert torch.equal(read.output_NLHRD, all_of_it.output_NLHRD)
    for one, two in zip(read.read, all_of_it.read, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize("below", ["full", "h2o:kept=0.5,every=3"])
@pytest.mark.parametrize("later", [POINT + 1, POINT + 9])
def test_later_rows_change_nothing_that_was_read(selected, below, later):
    """Law 3, for reads."""
    policies = policies_of(below, selected, ["0.2", "0.5"])
    case = make_case(rows=40)
    one, two = (run(each, policies, POINT) for each in (case, case.with_noise_from(later)))
    for t in range(POINT, later):
        assert torch.equal(one.read[t - POINT][..., :later], two.read[t - POINT][..., :later])


@pytest.mark.parametrize("selected", SELECTED)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_no_set_of_as_many_entries_has_more_mass_than_topk(selected, spread):
    case = make_case(rows=40, spread=spread)
    policy = policies_of("full", selected, ["0.2"])[0]
    found = run_family(case, [policy], POINT).measures
    mass_GR = found.mass_kept_NLHR[0].reshape(2, 2, 2, -1).sum(2)
    for r in range(case.num_rows - POINT):
        weights_LHK = case.reference.full(POINT, case.num_rows).weights_LHQK[:, :, r]
        weights_LGK = weights_LHK.reshape(2, 2, 2, -1).sum(2).sort(descending=True).values
        for at, g in np.ndindex(2, 2):
            bound = weights_LGK[at, g, : int(found.read_NLGR[0, at, g, r])].sum()
            assert mass_GR[at, g, r] <= bound + 1e-12
            if selected == "topk":
                np.testing.assert_allclose(mass_GR[at, g, r], bound, atol=1e-12)


@pytest.mark.parametrize("selected", [one for one in SELECTED if not one.startswith("topp")])
def test_a_row_reads_its_budget_rounded_down_to_pages(selected):
    case = make_case(rows=60)
    (policy,) = policies_of("full", selected, ["23tok"])
    if selected == "quest":  # it reads 3 pages of 16 at least
        policy = replace(policy, selector=replace(policy.selector, least=1))
    num_read = run_family(case, [policy], 30).measures.read_NLGR
    assert (num_read <= 23).all()
    assert (num_read > 23 - policy.selector.page_size).all()


def test_several_amounts_read_what_each_reads_alone():
    case = make_case(rows=40)
    for selected in SELECTED:
        policies = policies_of("full", selected, ["0.1", "0.4", "11tok"])
        together = run(case, policies, POINT).read
        for n, policy in enumerate(policies):
            for all_of_them, alone in zip(together, run(case, [policy], POINT).read, strict=True):
                assert torch.equal(all_of_them[n], alone[0])


def test_topp_reads_the_fewest_entries_with_the_mass():
    case = make_case(rows=40, groups=1, group_size=1)
    (policy,) = policies_of("full", "topp:mass=0.7", [])
    found = run_family(case, [policy], POINT).measures
    assert (found.mass_kept_NLHR >= 0.7 - 1e-8).all()
    weights_LHQK = case.reference.full(POINT, 40).weights_LHQK
    sums = weights_LHQK.sort(descending=True).values.cumsum(-1)
    np.testing.assert_array_equal(found.read_NLGR[0], 1 + (sums < 0.7 * (1 - 1e-9)).sum(-1))


def test_a_channel_that_no_query_uses_is_not_compared():
    case = make_case(rows=24, size=4)
    case.query_LHTD[..., 2] = 0
    case.key_LGTD[..., 2] *= 100
    for heavy, is_used in (("product", False), ("key", True)):
        (policy,) = policies_of("full", f"doublesparse:channels=1,heavy={heavy}", ["0.5"])
        engine = make_engine(case, [policy])
        engine.absorb(*case.rows(0, POINT))
        (channel_LGC,) = policy.selector.fit(engine.view(policy.selector.needs))
        assert (channel_LGC == 2).any().item() is is_used


def test_policies_with_a_selector_are_read_back_from_their_texts():
    for selected in SELECTED:
        for policy in policies_of("snapkv:kept=0.5", selected, ["0.1", "64tok"]):
            assert parse(policy.text) == policy
            assert policy.family == f"snapkv+{selected}"


@pytest.mark.parametrize("name", NAMES)
def test_a_grid_of_fractions_says_how_much_is_read(name):
    policy, takes = parse(name), SELECTORS.get(name).takes_amount
    assert policy.is_open is takes
    assert policy.name == "full"
    assert policy.family == name
    if takes:
        assert policy.with_kept(Frac(0.2)).selector.read == Frac(0.2)
        assert policy.with_kept(Frac(0.2)).kept == Frac(1.0)


def test_the_share_that_a_bound_finds_out_itself_cannot_be_asked_for():
    with pytest.raises(UsageError, match="leave read out"):
        parse("topp:read=0.2")
    with pytest.raises(UsageError, match="not bytes"):
        parse("quest:read=64MiB")
    assert parse("snapkv+topp").with_kept(Frac(0.3)).kept == Frac(0.3)
    assert parse("snapkv:kept=0.5+quest").with_kept(Frac(0.3)).selector.read == Frac(0.3)


@pytest.mark.parametrize(
    "text",
    [
        "quest:page=0",
        "quest:least=0",
        "shadowkv:chunk=0",
        "shadowkv:local=-1",
        "shadowkv:outliers=1.5",
        "doublesparse:channels=0",
        "topp:mass=0",
        "topp:mass=1.1",
    ],
)
def test_parameters_out_of_range_are_refused(text):
    with pytest.raises(UsageError, match=r"must be|is not in"):
        parse(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_selector_says_in_a_sentence_what_it_does_and_what_it_costs(name):
    selector, layer = SELECTORS.get(name)(), make_case(size=64).layer
    assert isinstance(selector, Selector)
    assert (selector.__doc__ or "").split("\n\n")[0].endswith(".")
    full_bytes = 2 * (layer.head_dim + layer.value_dim)
    assert 0 <= selector.state_bytes(layer, 2) <= selector.index_bytes(layer, 2) < full_bytes


def test_the_bytes_of_an_index_are_those_of_what_a_row_compares():
    layer = make_case(size=64).layer
    texts = {
        "quest": 2 * 64 * 2 / 16,
        "shadowkv": 64 * 2 / 8,
        "doublesparse": 16 * 2,
        "previous": 64 * 2,
    }
    for text, index_bytes in texts.items():
        assert parse(text).selector.index_bytes(layer, 2) == index_bytes
    assert parse("previous").selector.state_bytes(layer, 2) == 0
    assert parse("quest:read=7tok").selector.read == Tokens(7)
