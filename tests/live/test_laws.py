"""Laws 1 and 3 inside the model: a full budget changes nothing, and no decision looks ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kv.cases import TEXTS
from tests.kv.test_positions import EVICTING as TURNED
from tests.kv.test_storage import TRANSFORMED
from tests.live.cells import (
    NAMES,
    POINT,
    logits_of,
    policy_of,
    propagate,
    random_ids,
    tiny_model,
    tiny_run,
)
from tracekit.kv.amounts import Frac
from tracekit.kv.parse import parse
from tracekit.live.run import full_run

SPREAD = [(n, text) for n, text in enumerate(TEXTS) if not parse(text).scorer.needs.influence]
"""Influence is recorded: no pass over text alone has it."""


@pytest.mark.parametrize("model", NAMES)
def test_full_gives_the_logits_of_the_models_own_forward(model):
    """Law 1."""
    run = tiny_run(model, torch.float32)
    found = propagate(run, parse("full"))
    assert not any(gone for heads in found.evicted_at for gone in heads)
    with torch.no_grad():
        true_TV = run.loaded.model(run.ids_1T, use_cache=False).logits[0]
    logits_RV = logits_of(run.loaded, found.hidden_RE)
    torch.testing.assert_close(logits_RV, true_TV[POINT:], atol=1e-4, rtol=0)


def assert_like_full(run, policy):
    """Compare with ``full``, decided when the policy is, stored and placed as it says."""
    names = ("schedule", "positions", "transform")
    full = replace(parse("full"), **{name: getattr(policy, name) for name in names})
    found, true = (propagate(run, one) for one in (policy, full))
    assert found.evicted_at == true.evicted_at
    assert torch.equal(found.hidden_RE, true.hidden_RE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "text"), SPREAD)
def test_a_full_budget_gives_the_bits_of_full(n, text, dtype):
    """Law 1."""
    run = tiny_run(NAMES[n % len(NAMES)], dtype)
    assert_like_full(run, policy_of(text, "1.0", run.loaded))


@pytest.mark.parametrize("text", [*TURNED, *(f"h2o:every=3+{text}" for text in TRANSFORMED)])
def test_a_full_budget_of_turned_or_stored_entries_gives_the_bits_of_full(text):
    """Law 1."""
    run = tiny_run("llama", torch.float32)
    assert_like_full(run, policy_of(text, "1.0", run.loaded))


@pytest.mark.parametrize("stacked", ["topk:read=1.0", "quest:read=1.0,page=3", "shadowkv:read=1.0"])
def test_to_read_everything_gives_the_logits_of_full(stacked):
    run = tiny_run("llama")
    policy = policy_of(f"h2o:every=3+{stacked}", "1.0", run.loaded)
    found, true = (propagate(run, one) for one in (policy, parse("full")))
    torch.testing.assert_close(found.hidden_RE, true.hidden_RE, atol=1e-9, rtol=0)


@pytest.mark.parametrize("later", [POINT + 1, POINT + 6])
@pytest.mark.parametrize(
    ("n", "text"), [(n, text) for n, text in SPREAD if parse(text).scorer.causal]
)
def test_later_tokens_change_no_earlier_decision_in_any_layer(n, text, later):
    """Law 3."""
    model = NAMES[n % len(NAMES)]
    loaded = tiny_model(model)
    ids = random_ids()
    changed = full_run(loaded, ids[:later] + random_ids(len(ids) - later, seed=1))
    policy = policy_of(text, "0.4", loaded)
    one, two = (propagate(run, policy) for run in (tiny_run(model), changed))
    assert before(one.evicted_at, later) == before(two.evicted_at, later)
    rows = len(one.hidden_RE) - (len(ids) - later)
    torch.testing.assert_close(one.hidden_RE[:rows], two.hidden_RE[:rows], atol=1e-9, rtol=0)


@pytest.mark.parametrize("stacked", ["int4:group=3,residual=2", "quest:page=3,least=1", "previous"])
def test_later_tokens_change_no_earlier_row_of_stored_or_chosen_entries(stacked):
    """Law 3."""
    loaded, later = tiny_model("llama"), POINT + 5
    ids = random_ids()
    changed = full_run(loaded, ids[:later] + random_ids(len(ids) - later, seed=1))
    policy = policy_of(f"h2o:every=3+{stacked}", "0.4", loaded)
    if policy.selector is not None:
        policy = replace(policy, selector=replace(policy.selector, read=Frac(0.3)))
    one, two = (propagate(run, policy) for run in (tiny_run("llama"), changed))
    assert before(one.evicted_at, later) == before(two.evicted_at, later)
    rows = len(one.hidden_RE) - (len(ids) - later)
    torch.testing.assert_close(one.hidden_RE[:rows], two.hidden_RE[:rows], atol=1e-9, rtol=0)


def before(evicted_at: list[list[dict[int, int]]], later: int) -> list[list[dict[int, int]]]:
    """Return what left at decisions up to ``later`` tokens."""
    return [
        [{j: t for j, t in gone.items() if t <= later} for gone in heads] for heads in evicted_at
    ]
