"""How the next token is drawn: transformers' own rules, a batch's sequences each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class Choice:
    """A logits processor that leaves one token to each sequence: the one that it draws.

    ``generate`` then takes the largest, so that what a sequence draws hangs on its own seed and its
    own ids alone, never on its neighbours in the batch, and never on padding.

    Parameters
    ----------
    temperature, top_k, top_p, min_p, repetition_penalty
        As transformers defines them, in its order; 0, 0, 1, 0 and 1 switch them off.
    seeds
        One a sequence.
    pads
        Columns of padding before each sequence.
    device
        Where logits are.

    Notes
    -----
    A single sequence draws what ``generate(do_sample=True)`` draws after ``torch.manual_seed`` of its
    seed, on the same device.
    """

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        seeds: Sequence[int],
        pads: Sequence[int],
        device: torch.device,
    ) -> None:
        self._pads = list(pads)
        self._penalty: Any = None
        if repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(penalty=repetition_penalty)
        self._warpers: list[Any] = []
        self._generators: list[torch.Generator] | None = None
        if not temperature > 0:
            return
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        if temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(temperature))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            self._warpers.append(MinPLogitsWarper(min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V]: as they are for a greedy choice, else all but the drawn -inf."""
        if self._penalty is not None:
            rows = [
                self._penalty(input_ids[b : b + 1, pad:], scores[b : b + 1])
                for b, pad in enumerate(self._pads)
            ]
            scores = torch.cat(rows)
        if self._generators is None:
            return scores
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        prob_BV = torch.softmax(scores, dim=-1)
        drawn = torch.cat(
            [
                torch.multinomial(prob_BV[b : b + 1], num_samples=1, generator=generator)
                for b, generator in enumerate(self._generators)
            ]
        )
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)
