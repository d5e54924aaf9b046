"""Small random sequences with a head, shared by the tests of the vocabulary engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from tests import oracles_vocab as slow
from tracekit.measure.head import Head
from tracekit.spec import HeadSpec
from tracekit.vocab.blocks import blocks, runs_of
from tracekit.vocab.controller import Run
from tracekit.vocab.controllers.fixed import Fixed
from tracekit.vocab.engine import Tried, evaluate
from tracekit.vocab.others import Corpus, Others, Text
from tracekit.vocab.scheme import Scheme
from tracekit.vocab.view import Decoder, Sequence

if TYPE_CHECKING:
    from tracekit.vocab.estimator import Estimator

OWN = "own"
PROMPTS = (OWN, "b", "c")
NUM_LAYERS, NUM_HEADS = 4, 2


@dataclass(frozen=True)
class Prompt:
    """One recorded sequence: final hidden states, tokens, scored rows, attention, layer states."""

    prompt_id: str
    hidden_TE: torch.Tensor
    token_ids_T: torch.Tensor
    scored_S: torch.Tensor
    attention_LHTT: torch.Tensor
    residual_LTE: torch.Tensor
    domain: str = "story"

    def but(self, **changes: Any) -> Prompt:
        return replace(self, **changes)


@dataclass(frozen=True)
class Case:
    """One sequence of prompt ``own`` in a trace of three prompts."""

    own: Prompt
    rest: tuple[Prompt, ...]
    head: Head
    embedding_VE: torch.Tensor
    pinned_ids: torch.Tensor

    @property
    def width(self) -> int:
        return self.head.spec.num_rows

    @property
    def scored_S(self) -> torch.Tensor:
        return self.own.scored_S

    @property
    def hidden_TE(self) -> torch.Tensor:
        return self.own.hidden_TE

    @property
    def token_ids_T(self) -> torch.Tensor:
        return self.own.token_ids_T

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder(
            head=self.head,
            embedding=lambda: self.embedding_VE,
            num_layers=NUM_LAYERS,
            pinned_P=self.pinned_ids.unique(),
        )

    @cached_property
    def others(self) -> Others:
        texts = tuple(self._text(one) for one in (self.own, *self.rest))
        return Corpus(texts, self.width).without(OWN, self.own.domain)

    @property
    def recorded(self) -> Sequence:
        own = self.own

        def attention(layer: int, rows_S: torch.Tensor) -> torch.Tensor:
            return own.attention_LHTT[layer, :, rows_S, : int(rows_S[-1]) + 1]

        return Sequence(
            hidden_TE=own.hidden_TE,
            token_ids_T=own.token_ids_T,
            scored_S=own.scored_S,
            attention=attention,
            residual=lambda layer: own.residual_LTE[layer],
            runs=lambda: self._runs(own),
        )

    def logits(self) -> list[list[float]]:
        """Logits of all rows."""
        return self.head.logits(self.own.hidden_TE).tolist()

    def candidates(
        self, estimator: Estimator, limit: int, others: Others | None = None
    ) -> list[list[int]]:
        """Return the ranking of each scored step, without the -1 at its end.

        What is learned from is the case's own other prompts unless others are given.
        """
        ranked: list[list[int]] = []
        memory: dict[str, Any] = {}
        num_top = max(one.needs.previous for one in estimator.parts)
        others = self.others if others is None else others
        for block in blocks(self.recorded, self.decoder, others, num_top=num_top):
            ids_SK = estimator.candidates(block.known, memory, block.logits_SV, limit)
            assert ids_SK.dtype == torch.int64
            assert ids_SK.shape[0] == len(block.chosen_S)
            assert ids_SK.shape[1] <= limit
            ranked += [[i for i in row if i >= 0] for row in ids_SK.tolist()]
        return ranked

    def tried(self, schemes: list[Scheme], sizes: list[int]) -> list[Tried]:
        return evaluate(
            schemes, sizes, recorded=self.recorded, decoder=self.decoder, others=self.others
        )

    def tried_fixed(self, estimators: list[Estimator], sizes: list[int]) -> list[Tried]:
        """Return what estimators cover step by step, with fixed sizes."""
        return self.tried([Scheme(one, Fixed()) for one in estimators], sizes)

    def evaluate(self, estimators: list[Estimator], sizes: list[int]) -> list[dict[str, Any]]:
        """Return means over steps of each estimator, fixed sizes: a row an estimator and size."""
        return [
            {name: float(values_SN[:, n].mean()) for name, values_SN in one.columns.items()}
            | {"mass": float((1 - one.columns["missing_mass"][:, n]).mean()), "size": size}
            | {"bytes": one.cost_N[n].bytes, "macs": one.cost_N[n].macs}
            for one in self.tried_fixed(estimators, sizes)
            for n, size in enumerate(sizes)
        ]

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def _text(self, one: Prompt) -> Text:
        return Text(
            sequence_id=f"{one.prompt_id}-0",
            prompt_id=one.prompt_id,
            domain=one.domain,
            token_ids_T=one.token_ids_T,
            is_generated_T=torch.arange(len(one.token_ids_T)) > len(one.token_ids_T) // 2,
            scored_S=one.scored_S,
            hidden=lambda: one.hidden_TE,
            runs=lambda: self._runs(one),
        )

    def _runs(self, one: Prompt) -> tuple[list[Run], list[int]]:
        rows_R = runs_of(one.scored_S)
        runs = []
        for row in rows_R.tolist():
            logits = self.head.logits(one.hidden_TE[row : row + 1])[0].tolist()
            found = slow.statistics(
                logits, int(one.token_ids_T[row + 1]), num_tokens=self.width, temperature=1, top_k=1
            )
            names = ("entropy_nats", "varentropy", "free_energy", "internal_energy")
            surprisal = min(found["surprisal_nats"], 1e9)
            assert math.isfinite(found["entropy_nats"])
            state_E = one.hidden_TE[row].float().numpy()
            values = {name: found[name] for name in names}
            runs.append(Run(**values, surprisal_nats=surprisal, hidden_E=state_E))
        return runs, torch.searchsorted(rows_R, one.scored_S).tolist()


def make_prompt(
    rng: torch.Generator, prompt_id: str, *, width: int, size: int, num_rows: int, rows: list[int]
) -> Prompt:
    scores = torch.randn(NUM_LAYERS, NUM_HEADS, num_rows, num_rows, generator=rng)
    is_later = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
    return Prompt(
        prompt_id=prompt_id,
        hidden_TE=torch.randn(num_rows, size, generator=rng),
        token_ids_T=torch.randint(width, (num_rows + 1,), generator=rng),
        scored_S=torch.tensor(rows, dtype=torch.int64),
        attention_LHTT=scores.masked_fill(is_later, -torch.inf).softmax(-1),
        residual_LTE=torch.randn(NUM_LAYERS, num_rows, size, generator=rng),
    )


def make_case(
    seed: int = 0,
    *,
    width: int = 23,
    size: int = 6,
    num_rows: int = 9,
    scored: list[int] | None = None,
    num_pinned: int = 3,
    has_bias: bool = False,
    spread: float = 1.0,
) -> Case:
    """Return a random case; ``spread`` scales the logits, 0 makes them all equal."""
    rng = torch.Generator().manual_seed(seed)
    rows = list(range(num_rows // 2, num_rows)) if scored is None else scored
    spec = HeadSpec(num_rows=width, hidden_size=size, has_bias=has_bias)
    bias_V = torch.randn(width, generator=rng) * spread if has_bias else None
    own, *rest = (
        make_prompt(rng, prompt, width=width, size=size, num_rows=num_rows, rows=rows)
        for prompt in PROMPTS
    )
    return Case(
        own=own,
        rest=tuple(rest),
        head=Head(torch.randn(width, size, generator=rng) * spread, bias_V, spec),
        embedding_VE=torch.randn(width, size, generator=rng),
        pinned_ids=torch.randperm(width, generator=rng)[:num_pinned],
    )


def with_masked(case: Case, masked: list[int]) -> Case:
    """Return a case that has a bias with some tokens forbidden by it."""
    assert case.head.bias_V is not None
    ids = torch.tensor(masked, dtype=torch.int64)
    bias_V = case.head.bias_V.index_fill(0, ids, -torch.inf)
    return case.but(head=Head(case.head.weight_VE, bias_V, case.head.spec))
