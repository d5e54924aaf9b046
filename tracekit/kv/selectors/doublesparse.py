"""Read the entries that look best in a few heavy channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tracekit.errors import UsageError
from tracekit.kv.scorer import Needs
from tracekit.kv.selector import SELECTORS, GroupReduce, Selector
from tracekit.measure.attention import logits_HQK

if TYPE_CHECKING:
    import torch

    from tracekit.kv.selector import Choice, Fitted
    from tracekit.kv.view import View
    from tracekit.spec import LayerSpec


@SELECTORS.register("doublesparse")
@dataclass(frozen=True)
class DoubleSparse(Selector):
    """Reads the entries with the largest softmax of logits from the heaviest channels alone.

    Yang et al. 2024 (arXiv:2408.07092, section 3.1). The heaviest channels of each KV head have the
    largest mean of |q_d| times mean of |k_d| (which is the mean of |q_d k_d| over all pairs), or of
    |k_d| alone. They are found on the rows before the first decision and stay.

    Differences: the original finds channels on another text, and reads another set for each query
    head; here the softmax is reduced over the query heads of a KV head.

    Parameters
    ----------
    channels
        Channels that are compared; all, if a key has fewer.
    heavy
        ``product`` or ``key``: what makes a channel heavy.
    reduce
        ``mean`` or ``max`` over the query heads of a KV head.
    """

    channels: int = 16
    heavy: Literal["product", "key"] = "product"
    reduce: GroupReduce = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels < 1:
            msg = f"channels={self.channels} must be at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """Queries and keys of the rows before the first decision."""
        return Needs(queries=True, keys=True)

    def fit(self, view: View) -> Fitted:
        """Return the heaviest channels, int64 [L, G, C]; among equals the first ones."""
        weight_LGD = view.key_LGKD.abs().mean(2)
        if self.heavy == "product":
            by_group = view.query_LHKD.unflatten(1, (view.layer.num_kv_heads, -1))
            weight_LGD = weight_LGD * by_group.abs().mean((2, 3))
        order_LGD = weight_LGD.float().argsort(dim=-1, descending=True, stable=True)
        return (order_LGD[..., : self.channels],)

    def choose(self, choice: Choice) -> torch.Tensor:
        """Return the entries that look best, [N, L, G, Q, K]."""
        (channel_LGC,) = choice.fitted
        channel_LHC = channel_LGC.repeat_interleave(choice.layer.group_size, dim=1)
        logits_LHQK = logits_HQK(
            _channels(choice.query_LHQD, channel_LHC),
            _channels(choice.key_LGKD, channel_LGC),
            choice.layer,
        )
        return choice.best(choice.weights_NLGQK(logits_LHQK, self.reduce))

    def index_bytes(self, layer: LayerSpec, bytes_per_number: int) -> float:
        """Return the bytes of the heavy channels of a key, kept apart."""
        return float(min(self.channels, layer.head_dim) * bytes_per_number)


def _channels(rows_LXKD: torch.Tensor, channel_LXC: torch.Tensor) -> torch.Tensor:
    """Return some channels of each head, [L, X, K, C]."""
    return rows_LXKD.gather(-1, channel_LXC[:, :, None].expand(-1, -1, rows_LXKD.shape[2], -1))
