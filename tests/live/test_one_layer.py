"""One layer changed at a time, against whole passes in which an obvious attention does the same."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import architectures, tiny
from tracekit.errors import UsageError
from tracekit.kv.budget import Cache
from tracekit.kv.replay import Setting
from tracekit.kv.schedule import Spans
from tracekit.live import driver
from tracekit.live.driver import drive
from tracekit.live.layer_rule import DroppedRows, PolicyRule, parse_rule
from tracekit.live.one_layer import sweep_layers, untouched
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.live.run import full_run
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec
from tracekit.model.resume import decoder_layers
from tracekit.schema import ALL

if TYPE_CHECKING:
    from tracekit.kv.amounts import Frac
    from tracekit.live.layer_rule import LayerRule
    from tracekit.live.run import FullRun
    from tracekit.spec import LayerSpec

NUM_ROWS, POINT = 24, 10

CLOSE = {"llama": 1e-9, "mistral": 1e-9, "qwen3": 1e-9, "gpt2": 1e-9, "gemma2": 1e-5}
"""Eager attention, which Gemma 2 uses, takes its softmax in float32 whatever the model's type."""

RULES = ("rows:0.2", "h2o:kept=0.3,every=4", "snapkv:kept=0.4,window=4", "tova:kept=0.5")


@cache
def run_of(family: str) -> FullRun:
    model = architectures.model(family)
    spec = read_spec(model, name="tiny", num_tokens=len(tiny.tokenizer()))
    spec = replace(spec, dtype="float64")
    # Grouped products of experts are not made for float64.
    model.set_experts_implementation("eager")
    loaded = LoadedModel(model=model.double(), tokenizer=tiny.tokenizer(), spec=spec)
    ids = torch.randint(3, 260, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    return full_run(loaded, ids.tolist())


def setting_of(run: FullRun) -> Setting:
    layers = tuple(one for one in run.spec.layers if one.holds_keys)
    spans = Spans(num_tokens=NUM_ROWS + 1, prompt_end=POINT)
    return Setting(layers=(), cache=Cache(layers), spans=spans, seed=3)


def slow_row(
    query_D: torch.Tensor, key_KD: torch.Tensor, value_KD: torch.Tensor, layer: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one head's output and weights at one row, over the entries given."""
    logits = [float(query_D @ key_D) * layer.scale for key_D in key_KD]
    if layer.softcap is not None:
        logits = [layer.softcap * math.tanh(one / layer.softcap) for one in logits]
    raised = [math.exp(one - max(logits)) for one in logits]
    weights = torch.tensor([one / sum(raised) for one in raised], dtype=torch.float64)
    return weights @ value_KD, weights


def seen_by(row: int, layer: LayerSpec) -> list[int]:
    return [k for k in range(row + 1) if layer.window is None or k > row - layer.window]


class SlowPass:
    """A whole pass from the bottom: one layer does as the rule says, all others see everything."""

    def __init__(self, run: FullRun, rule: LayerRule, place: int, kv_head: int) -> None:
        self.run, self.rule, self.place, self.kv_head = run, rule, place, kv_head
        self.first_row = POINT

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        spec, reference = self.run.spec.layers[layer], self.run.references[layer]
        keys = torch.cat([reference.key_LGTD[0, :, :POINT], key[0]], dim=1)
        values = torch.cat([reference.value_LGTD[0, :, :POINT], value[0]], dim=1)
        output = self.slow(spec, query[0], keys, values, dropped=None)
        if layer != self.place:
            return output[None]
        if isinstance(self.rule, DroppedRows):
            changed = self.slow(spec, query[0], keys, values, self.rule.dropped)
        else:
            setting = setting_of(self.run)
            assert isinstance(self.rule, PolicyRule)
            family = planned(self.run, [self.rule.policy], setting)
            changed = Pruned(self.run, family, setting).attend(layer, query, key, value)[0]
        for head in range(spec.num_heads):
            if self.kv_head in (ALL, head // spec.group_size):
                output[head] = changed[head]
        return output[None]

    def slow(
        self,
        layer: LayerSpec,
        query_HQD: torch.Tensor,
        key_GKD: torch.Tensor,
        value_GKD: torch.Tensor,
        dropped: Frac | None,
    ) -> torch.Tensor:
        output = query_HQD.new_zeros(*query_HQD.shape[:2], value_GKD.shape[-1])
        for group in range(layer.num_kv_heads):
            heads = [h for h in range(layer.num_heads) if h // layer.group_size == group]
            for at in range(query_HQD.shape[1]):
                seen = seen_by(POINT + at, layer)
                if dropped is not None:
                    seen = self.kept(layer, query_HQD[heads, at], key_GKD[group], seen, dropped)
                for head in heads:
                    output[head, at], _ = slow_row(
                        query_HQD[head, at], key_GKD[group, seen], value_GKD[group, seen], layer
                    )
        return output

    def kept(
        self,
        layer: LayerSpec,
        query_MD: torch.Tensor,
        key_KD: torch.Tensor,
        seen: list[int],
        dropped: Frac,
    ) -> list[int]:
        """Return what is left of the entries that a row sees."""
        rows = [slow_row(query_D, key_KD[seen], key_KD[seen], layer)[1] for query_D in query_MD]
        mean = sum(rows) / len(rows)
        by_weight = sorted(seen[:-1], key=lambda k: (float(mean[seen.index(k)]), k))
        gone = by_weight[: math.floor(dropped.amount * len(seen) + 1e-9)]
        return [k for k in seen if k not in gone]


@pytest.mark.parametrize("family", CLOSE)
def test_a_sweep_equals_whole_passes_that_change_one_layer(family: str) -> None:
    run, rules = run_of(family), [parse_rule(text) for text in RULES]
    for swept in sweep_layers(run, rules, setting_of(run), heads=False):
        steering = SlowPass(run, swept.rule, swept.layer, ALL)
        expected = drive(run, steering, POINT)[0]
        torch.testing.assert_close(swept.hidden_RE, expected, rtol=0, atol=CLOSE[family])


def test_a_head_alone_equals_a_whole_pass_that_changes_it() -> None:
    run, rules = run_of("llama"), [parse_rule(text) for text in RULES[:2]]
    places = []
    for swept in sweep_layers(run, rules, setting_of(run), heads=True):
        places.append((swept.layer, swept.rule.text, swept.kv_head))
        expected = drive(run, SlowPass(run, swept.rule, swept.layer, swept.kv_head), POINT)[0]
        torch.testing.assert_close(swept.hidden_RE, expected, rtol=0, atol=1e-9)
    assert places == [
        (layer, rule.text, head) for layer in range(4) for rule in rules for head in (ALL, 0, 1)
    ]


def test_layers_that_read_the_keys_of_another_lose_what_it_evicts() -> None:
    run = run_of("gemma3n")
    setting, rule = setting_of(run), parse_rule("snapkv:kept=0.4,window=4")
    assert isinstance(rule, PolicyRule)
    owner = next(one.owner for one in run.spec.layers if one.owner is not None)
    readers = [one.index for one in run.spec.layers if one.owner == owner]
    swept = [one for one in sweep_layers(run, [rule], setting, heads=False) if one.layer == owner]
    pruned = Pruned(run, planned(run, [rule.policy], setting), setting)

    class Owner(SlowPass):
        def attend(
            self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            if layer == owner:
                return pruned.attend(layer, query, key, value)
            if layer not in readers:
                return super().attend(layer, query, key, value)
            spec, output = run.spec.layers[layer], torch.zeros_like(query[0])
            gone_at = pruned.evicted_at[owner][0]
            keys, values = (
                torch.cat([one[0, :, :POINT], new[0]], dim=1)
                for one, new in (
                    (run.references[layer].key_LGTD, key),
                    (run.references[layer].value_LGTD, value),
                )
            )
            for head in range(spec.num_heads):
                group = head // spec.group_size
                for at in range(query.shape[2]):
                    row = POINT + at
                    seen = [k for k in seen_by(row, spec) if gone_at[group, k] > row]
                    output[head, at], _ = slow_row(
                        query[0, head, at], keys[group, seen], values[group, seen], spec
                    )
            return output[None]

    expected = drive(run, Owner(run, rule, -5, ALL), POINT)[0]
    torch.testing.assert_close(swept[0].hidden_RE, expected, rtol=0, atol=1e-5)


def test_layers_below_are_not_run_again() -> None:
    run, rules = run_of("llama"), [parse_rule(text) for text in RULES]
    rows = 0

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        nonlocal rows
        rows += args[0].shape[0] * args[0].shape[1]

    layers = decoder_layers(run.loaded.model)
    handles = [one.mlp.register_forward_pre_hook(count) for one in layers]
    try:
        for _ in sweep_layers(run, rules, setting_of(run), heads=False):
            pass
    finally:
        for handle in handles:
            handle.remove()
    one_pass = len(layers) * (NUM_ROWS - POINT)
    assert rows == len(rules) * one_pass * (len(layers) + 1) // 2


def test_few_runs_at_once_give_what_many_give(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rules = run_of("llama"), [parse_rule(text) for text in RULES]
    many = list(sweep_layers(run, rules, setting_of(run), heads=True))
    monkeypatch.setattr(driver, "ROWS_AT_ONCE", 1)
    few = list(sweep_layers(run, rules, setting_of(run), heads=True))
    for one, other in zip(many, few, strict=True):
        assert one[:3] == other[:3]
        torch.testing.assert_close(one.hidden_RE, other.hidden_RE, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", [*CLOSE, "gpt_oss"])
def test_rows_run_anew_with_nothing_changed_are_as_recorded(family: str) -> None:
    run = run_of(family)
    hidden_RE = untouched(run, setting_of(run), POINT)
    torch.testing.assert_close(hidden_RE, run.hidden_TE[POINT:], rtol=0, atol=1e-5)


def test_what_is_left_is_counted() -> None:
    run = run_of("mistral")
    rules = [parse_rule("rows:0.25"), parse_rule("streaming:kept=0.5,sinks=1,every=1")]
    rows, policy = list(sweep_layers(run, rules, setting_of(run), heads=False))[:2]
    window = run.spec.layers[0].window
    assert window == 8
    assert (rows.left_frac_R == 6 / 8).all()
    held = [min(window, math.floor(0.5 * (row)) + 1) for row in range(POINT, NUM_ROWS)]
    assert (policy.left_frac_R * window <= torch.tensor(held)).all()
    assert (policy.left_frac_R > 0).all()


@given(
    num_rows=st.integers(1, 6),
    num_before=st.integers(0, 9),
    dropped=st.sampled_from([0.03, 0.2, 0.29, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_rows_drop_the_lowest_but_never_their_own(
    num_rows: int, num_before: int, dropped: float, seed: int
) -> None:
    num_keys = num_before + num_rows
    generator = torch.Generator().manual_seed(seed)
    # Few values: ties are common.
    weights_GQK = torch.randint(0, 4, (2, num_rows, num_keys), generator=generator).double()
    seen_QK = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_before)
    rule = parse_rule(f"rows:{dropped}")
    assert isinstance(rule, DroppedRows)
    kept_GQK = rule.kept(weights_GQK, seen_QK)
    for group in range(2):
        for at in range(num_rows):
            num_seen = num_before + at + 1
            number = min(num_seen - 1, (num_seen * round(dropped * 100)) // 100)
            weights = weights_GQK[group, at].tolist()
            others = sorted(range(num_seen - 1), key=lambda k: (weights[k], k))
            left = set(range(num_seen)) - set(others[:number])
            assert set(kept_GQK[group, at].nonzero().flatten().tolist()) == left


def test_the_text_of_a_rule_names_it() -> None:
    assert parse_rule("rows:0.03").text == "rows:0.03,at=prompt"
    for text in ("rows:0.03,at=0.25", "rows:0.1,at=context", "h2o:kept=0.3,every=16"):
        rule = parse_rule(text)
        assert parse_rule(rule.text) == rule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows", "drops no entries"),
        ("rows:2", r"not in \(0, 1\]"),
        ("rows:0.1,every=3", "drops no entries"),
        ("h2o", "says no amount"),
        ("h3o:kept=0.3", "unknown policy"),
    ],
)
def test_a_rule_that_does_not_exist_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_rule(text)
