"""Keys and values that stand out against the tokens that follow them stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tracekit.errors import UsageError
from tracekit.kv.packed import cache_order
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    from tracekit.kv.view import View


@SCORERS.register("lag")
@dataclass(frozen=True)
class Lag(Scorer):
    """Score = rank of a key in its partition by its spread, seen from the next partition.

    Serves ``lagkv`` (Liang et al. 2025, arXiv:2504.04704). The held keys after the sinks
    are cut into partitions of ``lag``, in cache order. The channels of a partition are scaled by
    their minimum and maximum in the next one; a key's standard deviation over channels goes
    through a softmax over the partition, the same is done for values, and the score is the rank
    of the mean of both, over ``lag``. The last full partition and what follows it have nothing to
    be compared with and stay before all others; so does everything while there are less than two
    partitions, which leaves sinks and the newest keys.

    Differences: a channel that is constant in the next partition counts as 0, where the original
    divides by 0; keys of one rank in different partitions tie, and the newer stays, where kvpress
    leaves it to ``topk``. Defaults are kvpress's; the original has 16 sinks and a lag of 1024.

    Parameters
    ----------
    sinks
        First positions, which stay and are in no partition.
    lag
        Tokens of a partition.
    """

    sinks: int = 4
    lag: int = 128

    presets: ClassVar = (Preset(name="lagkv", sinks=4),)

    def __post_init__(self) -> None:
        if self.lag < 1:
            msg = f"lag={self.lag} is a number of tokens, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Keys and values."""
        return Needs(keys=True, values=True)

    def score(self, view: View) -> torch.Tensor:
        """Return ranks from 0 to 1, [N, L, G, K]."""
        return torch.stack([self._ranks(view, held_LGK) for held_LGK in view.held_NLGK])

    def _ranks(self, view: View, held_LGK: torch.Tensor) -> torch.Tensor:
        """Return the scores [L, G, K] of one kept set."""
        line_LGK = held_LGK & (view.position_K >= self.sinks)
        parts_LG = line_LGK.sum(-1) // self.lag
        num_parts = int(parts_LG.max())
        score_LGK = torch.ones(held_LGK.shape, device=held_LGK.device)
        if num_parts < 2:
            return score_LGK
        order_LGX = cache_order(line_LGK)[..., : num_parts * self.lag]
        order_LGPK = order_LGX.unflatten(-1, (num_parts, self.lag))
        spread_LGPK = (
            _spread(view.key_LGKD, order_LGPK) + _spread(view.value_LGKD, order_LGPK)
        ) / 2
        # Rounded, so that equal spreads tie in whichever order they were summed.
        worst_first_LGPK = spread_LGPK.float().argsort(dim=-1, stable=True)
        rank_LGPK = worst_first_LGPK.argsort(dim=-1) / self.lag
        part_P1 = torch.arange(num_parts - 1, device=held_LGK.device)[:, None]
        rank_LGPK = rank_LGPK.where(part_P1 < parts_LG[..., None, None] - 1, 1.0)
        return score_LGK.scatter(-1, order_LGPK[:, :, :-1].flatten(2), rank_LGPK.flatten(2))


def _spread(entry_LGKD: torch.Tensor, order_LGPK: torch.Tensor) -> torch.Tensor:
    """Return how entries of all partitions but the last spread over channels, [L, G, P - 1, K]."""
    size = entry_LGKD.shape[-1]
    index_LGKD = order_LGPK.flatten(2)[..., None].expand(-1, -1, -1, size)
    part_LGPKD = entry_LGKD.gather(2, index_LGKD).unflatten(2, order_LGPK.shape[2:])
    next_LGPKD = part_LGPKD[:, :, 1:]
    low_LGP1D = next_LGPKD.amin(-2, keepdim=True)
    range_LGP1D = next_LGPKD.amax(-2, keepdim=True) - low_LGP1D
    scaled_LGPKD = (part_LGPKD[:, :, :-1] - low_LGP1D) / range_LGP1D
    scaled_LGPKD = scaled_LGPKD.masked_fill(range_LGP1D == 0, 0)
    centred_LGPKD = scaled_LGPKD - scaled_LGPKD.mean(-1, keepdim=True)
    variance_LGPK = centred_LGPKD.square().sum(-1) / max(size - 1, 1)
    spread_LGPK: torch.Tensor = variance_LGPK.sqrt().softmax(-1)
    return spread_LGPK
