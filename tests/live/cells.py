"""Tiny models, policies and the one pass that law 5 is tested with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from tests import architectures
from tests.kv.cases import SEED, family, head_file
from tracekit.kv.budget import Cache
from tracekit.kv.engine import NEVER
from tracekit.kv.plan import make_shares, observe
from tracekit.kv.replay import Family, Setting
from tracekit.kv.schedule import Spans
from tracekit.live.driver import drive
from tracekit.live.pruned import Pruned
from tracekit.live.run import FullRun, full_run
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec

if TYPE_CHECKING:
    from tracekit.kv.policy import Policy

POINT, NUM_ROWS = 16, 26

NAMES = ["llama", "mistral", "gemma2", "qwen3", "gpt2"]


@cache
def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """Return a random model of 2 layers whose attention is far from even."""
    model = architectures.model(name, num_hidden_layers=2, initializer_range=0.3)
    # Gemma's own softmax rounds to float32, which the self-check would take for a difference.
    spec = read_spec(model, name=name, num_tokens=272)
    return LoadedModel(model=model.to(dtype), tokenizer=None, spec=spec)


@cache
def tiny_run(name: str, dtype: torch.dtype = torch.float64) -> FullRun:
    """Return a text of random tokens under the full cache."""
    return full_run(tiny_model(name, dtype), random_ids())


def random_ids(num_rows: int = NUM_ROWS, seed: int = 0) -> list[int]:
    """Return token ids."""
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 272, (num_rows,), generator=draw).tolist()
    return ids


def spans_of(run: FullRun, point: int = POINT) -> Spans:
    """Return the spans of a text whose prompt ends at ``point``."""
    return Spans(num_tokens=run.num_rows + 1, prompt_end=point)


def policy_of(text: str, kept: str, loaded: LoadedModel) -> Policy:
    """Return a policy with a kept amount and, if it reads a file of heads, one that fits."""
    (policy,) = family(text, [kept])
    budget: Any = policy.layers
    if "file" not in {one.name for one in fields(budget)}:
        return policy
    layers = loaded.spec.layers
    file = head_file(len(layers), layers[0].num_kv_heads)
    return replace(policy, layers=replace(budget, file=file))


@dataclass(frozen=True)
class Propagated:
    """What one pass gives: hidden states [R, E], and who left when, by layer and KV head."""

    hidden_RE: torch.Tensor
    evicted_at: list[list[dict[int, int]]]


def propagate(run: FullRun, policy: Policy, point: int = POINT) -> Propagated:
    """Run the rows after the eviction point in one pass."""
    spans = spans_of(run, point)
    setting = Setting(layers=(), cache=Cache(run.spec.layers), spans=spans, seed=SEED)
    observed = [
        observe(policy, run.references[one.index], replace(setting, layers=(one.index,)))
        for one in run.spec.layers
    ]
    pruned = Pruned(run, Family((policy,), make_shares([policy], observed, setting)), setting)
    hidden_1RE = drive(run, pruned, pruned.first_row)
    evicted_at = [_by_position(pruned.evicted_at[one.index][0]) for one in run.spec.layers]
    return Propagated(hidden_1RE[0], evicted_at)


def _by_position(evicted_at_GK: torch.Tensor) -> list[dict[int, int]]:
    """Return by KV head the tokens seen when each evicted position left."""
    return [
        {j: seen for j, seen in enumerate(row) if seen != NEVER} for row in evicted_at_GK.tolist()
    ]


def logits_of(loaded: LoadedModel, hidden_RE: torch.Tensor) -> torch.Tensor:
    """Return the logits [R, V] of final hidden states, in their own type."""
    with torch.no_grad():
        logits_RV: torch.Tensor = loaded.model.get_output_embeddings()(hidden_RE)
    cap = loaded.spec.head.softcap
    return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)
