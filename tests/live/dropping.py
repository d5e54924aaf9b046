"""A plain decoder that really drops entries, as fast as decoding: tensors of what is kept, no more.

The prompt is one pass of the model. Each later row is a pass of one token, which attends by a plain
softmax over what its layer holds; a decision selects the rows to keep and lets the others go. Rules
are written from their formulas. All KV heads of a layer hold equally many entries.

Written for full layers without soft-cap or sinks, one sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch.nn.functional import avg_pool1d, pad

from tests.live.attending import attending

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Stats = dict[str, torch.Tensor]
    """What a rule has noted of each entry, [..., K], K as many as are held."""


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """What is noted of entries as rows read them, and what they are worth.

    Parameters
    ----------
    kept_frac
        Entries to keep, of the tokens seen, rounded down.
    every
        Tokens between decisions; 0: one decision.
    sinks, recent
        First and newest positions that stay.
    """

    kept_frac: float
    every: int = 1
    sinks: int = 0
    recent: int = 0

    def newest(self, budget: int) -> int:
        """Return how many of the newest positions stay."""
        del budget
        return self.recent

    def start(self, num_heads: int, group_size: int) -> Stats:
        """Return empty notes, G KV heads of M query heads each."""
        del num_heads, group_size
        return {}

    def note(self, stats: Stats, weights_GMQK: torch.Tensor, first_row: int) -> None:
        """Take the attention of some rows; notes of their own entries are 0 so far."""
        del stats, weights_GMQK, first_row

    @abstractmethod
    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return what each entry is worth [G, K]."""


@final
@dataclass(frozen=True, kw_only=True)
class Streaming(Rule):
    """The newest, beside sinks."""

    sinks: int = 4

    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return positions."""
        return position_GK.float()


@final
@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Rule):
    """H2O: attention received so far, mean over the group; half of the budget for the newest."""

    def newest(self, budget: int) -> int:
        """Return half of the budget."""
        return budget // 2

    def start(self, num_heads: int, group_size: int) -> Stats:
        """Nothing was received."""
        return {"received": torch.zeros(num_heads, 0)}

    def note(self, stats: Stats, weights_GMQK: torch.Tensor, first_row: int) -> None:
        """Add the rows' attention."""
        stats["received"] += weights_GMQK.mean(1).sum(1)

    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return what was received."""
        return stats["received"]


@final
@dataclass(frozen=True, kw_only=True)
class LastRow(Rule):
    """TOVA: the newest row's attention, mean over all heads of the layer."""

    recent: int = 1

    def start(self, num_heads: int, group_size: int) -> Stats:
        """No row was read."""
        return {"last": torch.zeros(num_heads, 0)}

    def note(self, stats: Stats, weights_GMQK: torch.Tensor, first_row: int) -> None:
        """Keep the newest row's attention alone."""
        stats["last"] = weights_GMQK[:, :, -1].mean((0, 1)).expand(len(weights_GMQK), -1)

    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return it."""
        return stats["last"]


@final
@dataclass(frozen=True, kw_only=True)
class Window(Rule):
    """SnapKV: mean attention of the prompt's last rows, pooled over neighbours; decided once."""

    every: int = 0
    window: int = 32
    kernel: int = 5

    def newest(self, budget: int) -> int:
        """Return the window."""
        return self.window

    def note(self, stats: Stats, weights_GMQK: torch.Tensor, first_row: int) -> None:
        """Take the prompt, of which nothing was evicted; later rows play no part."""
        if first_row == 0:
            mass_GMK = weights_GMQK[:, :, -self.window :].mean(2)[..., : -self.window]
            pooled_GMK = avg_pool1d(mass_GMK, self.kernel, stride=1, padding=self.kernel // 2)
            stats["pooled"] = pad(pooled_GMK.mean(1), (0, self.window))

    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the pooled means."""
        return stats["pooled"]


@final
@dataclass(frozen=True, kw_only=True)
class Redundancy(Rule):
    """tracekit's own: reads a row, in standard units, heads' agreement, rounds unread."""

    sinks: int = 4
    round_tokens: int = 64

    def start(self, num_heads: int, group_size: int) -> Stats:
        """Nothing was read."""
        none = torch.zeros(num_heads, 0)
        received = torch.zeros(num_heads, group_size, 0)
        return {"reads": none, "end": none, "received": received}

    def note(self, stats: Stats, weights_GMQK: torch.Tensor, first_row: int) -> None:
        """Count the rows that give more than an even share; note the end of the last of them."""
        end_Q1 = first_row + 1 + torch.arange(weights_GMQK.shape[2])[:, None]
        is_read_GQK = weights_GMQK.amax(1) * end_Q1 > 1 + 1e-6
        stats["reads"] += is_read_GQK.sum(1)
        stats["end"] = torch.maximum(stats["end"], (is_read_GQK * end_Q1).amax(1).float())
        stats["received"] += weights_GMQK.sum(2)

    def score(self, stats: Stats, position_GK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return z + log agreement - log(1 + rounds)."""
        reads_GK = stats["reads"].double() / (num_tokens - position_GK)
        off_GK = reads_GK - reads_GK.mean(-1, keepdim=True)
        z_GK = off_GK / off_GK.square().mean(-1, keepdim=True).sqrt()
        last_GK = torch.maximum(stats["end"], position_GK + 1.0).long()
        rounds_GK = (num_tokens - last_GK) // self.round_tokens
        agreement_GK = _agreement(stats["received"]).clamp(min=1e-6)
        return z_GK + agreement_GK.log() - rounds_GK.double().log1p()


def _agreement(received_GMK: torch.Tensor) -> torch.Tensor:
    """Return 1 - the mean difference of ranks over pairs of heads, of the most that it can be."""
    smaller_GMK = (received_GMK[..., None] > received_GMK[..., None, :]).sum(-1)
    equal_GMK = (received_GMK[..., None] == received_GMK[..., None, :]).sum(-1) - 1
    rank_GMK = smaller_GMK + equal_GMK.double() / 2
    size, num_keys = received_GMK.shape[1:]
    differences = (rank_GMK[:, :, None] - rank_GMK[:, None]).abs().sum((1, 2)) / 2
    return 1 - differences / (size * (size - 1) / 2) / (num_keys - 1)


class Decision(NamedTuple):
    """What one layer kept after ``num_tokens``: positions [G, K], and how narrowly.

    ``gap_G`` is the score of the last entry kept less that of the first let go, relative; infinite
    where protection alone decided.
    """

    num_tokens: int
    position_GK: torch.Tensor
    gap_G: torch.Tensor


@dataclass
class Layer:
    """What one layer holds."""

    rule: Rule
    scale: float
    key_GKD: torch.Tensor
    value_GKD: torch.Tensor
    position_GK: torch.Tensor
    stats: Stats
    decisions: list[Decision] = field(default_factory=list)

    def take(self, key_GQD: torch.Tensor, value_GQD: torch.Tensor, first_row: int) -> None:
        """Hold the entries of the next rows."""
        num_rows = key_GQD.shape[1]
        position_Q = torch.arange(first_row, first_row + num_rows)
        self.key_GKD = torch.cat((self.key_GKD, key_GQD), dim=1)
        self.value_GKD = torch.cat((self.value_GKD, value_GQD), dim=1)
        self.position_GK = torch.cat((self.position_GK, position_Q.expand(len(key_GQD), -1)), dim=1)
        self.stats = {name: pad(one, (0, num_rows)) for name, one in self.stats.items()}

    def attend(self, query_HQD: torch.Tensor) -> torch.Tensor:
        """Return the weights [G, M, Q, K] of the newest rows."""
        query_GMQD = self.scale * query_HQD.unflatten(0, (len(self.key_GKD), -1))
        logits_GMQK = query_GMQD @ self.key_GKD.mT[:, None]
        num_rows, num_keys = logits_GMQK.shape[2:]
        if num_rows > 1:
            later_QK = torch.ones(num_rows, num_keys).triu(num_keys - num_rows + 1).bool()
            logits_GMQK = logits_GMQK.masked_fill(later_QK, -torch.inf)
        weights_GMQK: torch.Tensor = logits_GMQK.softmax(-1)
        return weights_GMQK

    def decide(self, num_tokens: int) -> None:
        """Keep the best, and let the others go."""
        num_held, budget = self.position_GK.shape[1], int(self.rule.kept_frac * num_tokens)
        if budget < num_held:
            score_GK = self.rule.score(self.stats, self.position_GK, num_tokens).float()
            is_recent_GK = self.position_GK >= num_tokens - self.rule.newest(budget)
            is_safe_GK = is_recent_GK | (self.position_GK < self.rule.sinks)
            # Entries are in the order of the text: read backwards, the newest of equals is first.
            order_GK = score_GK.masked_fill(is_safe_GK, torch.inf).flip(-1)
            ordered = order_GK.sort(dim=-1, descending=True, stable=True)
            index_GK = (num_held - 1 - ordered.indices[:, :budget]).sort(-1).values
            last_G, first_G = ordered.values[:, budget - 1], ordered.values[:, budget]
            gap_G = (last_G - first_G) / torch.maximum(last_G.abs(), first_G.abs())
            self._select(index_GK)
        else:
            gap_G = torch.full((len(self.position_GK),), torch.inf)
        self.decisions.append(
            Decision(num_tokens, self.position_GK, gap_G.nan_to_num(torch.inf, torch.inf))
        )

    def _select(self, index_GK: torch.Tensor) -> None:
        """Keep the entries at some places of each head."""
        self.key_GKD, self.value_GKD = (
            x.gather(1, index_GK[..., None].expand(-1, -1, x.shape[-1]))
            for x in (self.key_GKD, self.value_GKD)
        )
        self.position_GK = self.position_GK.gather(1, index_GK)
        for name, x in self.stats.items():
            index = index_GK if x.ndim == 2 else index_GK[:, None].expand(-1, x.shape[1], -1)
            self.stats[name] = x.gather(-1, index)


class Dropping:
    """A model under a rule, from the end of the prompt on.

    Parameters
    ----------
    model
        A causal language model of transformers with grouped heads, all of its layers full.
    rule
        What is kept.
    """

    def __init__(self, model: Any, rule: Rule) -> None:
        self._model, self._rule = model, rule
        self.layers: dict[int, Layer] = {}
        self._num_tokens = 0

    def rows(self, ids: Sequence[int], point: int) -> Iterator[torch.Tensor]:
        """Yield the final hidden states [1, E] of each row from ``point`` on, teacher-forced."""
        rule = self._rule
        with attending(self._model, self._attend), torch.no_grad():
            self._forward(ids[:point])
            for t in range(point, len(ids)):
                if t == point or (rule.every and (t - point) % rule.every == 0):
                    for layer in self.layers.values():
                        layer.decide(t)
                yield self._forward(ids[t : t + 1])

    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        start = self._num_tokens
        position_1Q = torch.arange(start, start + len(ids))[None]
        decoder = self._model.get_decoder()
        output = decoder(input_ids=torch.tensor([ids]), position_ids=position_1Q, use_cache=False)
        self._num_tokens += len(ids)
        hidden_QE: torch.Tensor = output[0][0]
        return hidden_QE

    def _attend(
        self, layer: int, query_1HQD: torch.Tensor, key_1GQD: torch.Tensor, value_1GQD: torch.Tensor
    ) -> torch.Tensor | None:
        query_HQD, key_GQD, value_GQD = query_1HQD[0], key_1GQD[0], value_1GQD[0]
        start = self._num_tokens
        if start == 0:
            self.layers[layer] = self._open(query_HQD, key_GQD, value_GQD)
        held = self.layers[layer]
        held.take(key_GQD, value_GQD, start)
        weights_GMQK = held.attend(query_HQD)
        self._rule.note(held.stats, weights_GMQK, start)
        if start == 0:
            return None
        return (weights_GMQK @ held.value_GKD[:, None]).flatten(0, 1)[None]

    def _open(
        self, query_HQD: torch.Tensor, key_GQD: torch.Tensor, value_GQD: torch.Tensor
    ) -> Layer:
        num_heads = len(key_GQD)
        return Layer(
            self._rule,
            query_HQD.shape[-1] ** -0.5,
            key_GQD[:, :0],
            value_GQD[:, :0],
            torch.zeros(num_heads, 0, dtype=torch.int64),
            self._rule.start(num_heads, len(query_HQD) // num_heads),
        )
