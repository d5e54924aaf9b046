"""Law 5: eviction inside one pass equals decoding with a cache that really drops entries."""

from __future__ import annotations

from dataclasses import replace
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kv.cases import TEXTS
from tests.kv.test_positions import EVICTING as TURNED
from tests.kv.test_selectors import SELECTED
from tests.kv.test_storage import TRANSFORMED
from tests.live.cells import (
    NAMES,
    POINT,
    logits_of,
    policy_of,
    propagate,
    random_ids,
    spans_of,
    tiny_model,
    tiny_run,
)
from tests.live.decoder import Decoder
from tests.live.dropping import (
    Dropping,
    HeavyHitters,
    LastRow,
    Redundancy,
    Rule,
    Streaming,
    Window,
)
from tracekit.errors import TracekitError
from tracekit.kv.amounts import Frac
from tracekit.kv.parse import parse
from tracekit.kv.presets import PRESETS
from tracekit.kv.selector import SELECTORS
from tracekit.kv.transform import TRANSFORMS
from tracekit.live.run import FullRun, full_run
from tracekit.model.load import load_model

if TYPE_CHECKING:
    from tests.live.cells import Propagated
    from tracekit.kv.policy import Policy

BELOW = ["full", "h2o:every=3", "knorm:every=2,recent=2"]
LOW_RANK = ["lowrank:rank=2,residual=4", "lowrank:rank=3,residual=2,basis=layer"]
STACKED = [*TRANSFORMED, *LOW_RANK, *SELECTED, "int4:group=4,residual=2+topk"]
CAUSAL = [text for text in TEXTS if parse(text).scorer.causal]
"""Oracles look ahead: no decoder equals them."""

POLICIES = [*CAUSAL, *(f"{BELOW[n % 3]}+{text}" for n, text in enumerate(STACKED))]
KEPT = ["0.3", "0.4", "4tok"]
OTHERS = NAMES[1:]
ROTARY = ["mistral", "gemma2", "qwen3"]

CELLS = [
    *((text, model) for text in [*POLICIES, *TURNED] for model in ["llama"]),
    *((text, OTHERS[n % len(OTHERS)]) for n, text in enumerate(POLICIES)),
    *((text, ROTARY[n % len(ROTARY)]) for n, text in enumerate(TURNED)),
]
"""Every policy on two models at least, every model with policies of every kind."""


def amounts_of(n: int, text: str, model: str) -> Policy:
    """Return the policy with what it keeps, and reads if a selector is to be told."""
    policy = policy_of(text, KEPT[n % len(KEPT)], tiny_model(model))
    if not policy.is_open:
        return policy
    return replace(policy, selector=replace(policy.selector, read=Frac(0.3)))


@pytest.mark.parametrize(
    ("n", "text", "model"),
    [pytest.param(n, *cell, id=" ".join(cell)) for n, cell in enumerate(CELLS)],
)
def test_one_pass_decides_and_gives_what_a_decoder_that_drops_entries_does(n, text, model):
    policy, run = amounts_of(n, text, model), tiny_run(model)
    decoded = Decoder(run.loaded, policy, spans_of(run)).run(random_ids())
    found = propagate(run, policy)
    assert found.evicted_at == decoded.evicted_at
    logits, true = (logits_of(run.loaded, one.hidden_RE) for one in (found, decoded))
    torch.testing.assert_close(logits, true, atol=1e-6, rtol=0)
    for t, held in decoded.held.items():
        assert held == [
            [held_after(gone, t, layer.window) for gone in heads]
            for layer, heads in zip(run.spec.layers, found.evicted_at, strict=True)
        ]


def held_after(gone: dict[int, int], num_tokens: int, window: int | None) -> set[int]:
    """Return the positions that a history says are held after a decision."""
    first = max(0, num_tokens - (window or num_tokens))
    return {j for j in range(first, num_tokens) if gone.get(j, num_tokens + 1) > num_tokens}


def test_every_policy_transform_and_selector_of_the_registries_is_decoded():
    named = [parse(text) for text, _ in CELLS]
    oracles = {parse(text).name for text in TEXTS} - {parse(text).name for text in CAUSAL}
    assert {one.name for one in named} | oracles >= set(PRESETS.names())
    transforms = {TRANSFORMS.name_of(type(one.transform)) for one in named if one.transform}
    assert transforms == set(TRANSFORMS.names())
    selectors = {SELECTORS.name_of(type(one.selector)) for one in named if one.selector}
    assert selectors == set(SELECTORS.names())


@pytest.mark.parametrize("model", NAMES)
def test_what_is_compared_is_not_the_full_cache(model):
    run = tiny_run(model)
    full = logits_of(run.loaded, run.hidden_TE[POINT:])
    found = propagate(run, policy_of("h2o:every=3", "0.3", run.loaded))
    assert all(gone for heads in found.evicted_at for gone in heads)
    assert (logits_of(run.loaded, found.hidden_RE) - full).abs().max() > 0.1


@pytest.mark.parametrize("text", ["streamingllm", "h2o:positions=cache"])
def test_places_in_the_cache_are_refused_where_positions_are_learned(text):
    run = tiny_run("gpt2")
    with pytest.raises(TracekitError, match="positions=cache"):
        propagate(run, policy_of(text, "0.4", run.loaded))


NUM_PROMPT, NUM_NEW = 96, 48
NEAR_TIE = 1e-5

RULES: dict[str, Rule] = {
    "h2o:every=4": HeavyHitters(kept_frac=0.5, every=4),
    "snapkv": Window(kept_frac=0.5),
    "streaming": Streaming(kept_frac=0.5),
    "tova": LastRow(kept_frac=0.5),
    "redundancy:layers=uniform,every=8,round_tokens=8,recent=8": Redundancy(
        kept_frac=0.5, every=8, round_tokens=8, recent=8
    ),
}


@pytest.fixture(scope="module")
def real_run() -> FullRun:
    loaded = load_model("smollm2-135m")
    text = " ".join(topics[name] for name in sorted(topics)[:20])
    return full_run(loaded, loaded.tokenizer(text)["input_ids"][: NUM_PROMPT + NUM_NEW])


@pytest.mark.slow
@pytest.mark.parametrize("text", RULES)
def test_the_real_model_decides_alike_but_for_near_ties(real_run, text, record_property):
    loaded, ids = real_run.loaded, real_run.ids_1T[0].tolist()
    decoder = Dropping(loaded.model, RULES[text])
    dropped_RE = torch.cat(list(decoder.rows(ids, NUM_PROMPT)))
    found = propagate(real_run, policy_of(text, "0.5", loaded), NUM_PROMPT)
    flips = flips_between(found, decoder)
    record_property("flips", len(flips))
    for t, _, _, gap in first_of(flips):
        assert gap < NEAR_TIE, f"after {t} tokens"
    until = min((t for t, *_ in flips), default=len(ids)) - NUM_PROMPT
    logits, true = (logits_of(loaded, one) for one in (found.hidden_RE, dropped_RE))
    torch.testing.assert_close(logits[:until], true[:until], atol=1e-3, rtol=0)
    target_R = real_run.ids_1T[0, NUM_PROMPT + 1 :]
    perplexities = [
        torch.nn.functional.cross_entropy(one[:-1].double(), target_R).exp().item()
        for one in (logits, true)
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=5e-4 if flips else 1e-4)


def flips_between(found: Propagated, decoder: Dropping) -> list[tuple[int, int, int, float]]:
    """Return (tokens seen, layer, KV head, gap) of the decisions that differ, in order."""
    flips = []
    for number, layer in decoder.layers.items():
        for seen, position_GK, gap_G in layer.decisions:
            for g, kept in enumerate(position_GK.tolist()):
                if set(kept) != held_after(found.evicted_at[number][g], seen, None):
                    flips.append((seen, number, g, float(gap_G[g])))
    return sorted(flips)


def first_of(flips: list[tuple[int, int, int, float]]) -> list[tuple[int, int, int, float]]:
    """Return the flips that no earlier one explains: in a layer below, or in the same head."""
    return [
        (t, layer, g, gap)
        for t, layer, g, gap in flips
        if not any(
            at < t and (lower < layer or (lower, head) == (layer, g))
            for at, lower, head, _ in flips
        )
    ]
