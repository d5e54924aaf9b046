"""Keys that kept being important stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import UsageError
from tracekit.kv.scorer import SCORERS, Needs, Preset, Scorer

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View


@SCORERS.register("persistence")
@dataclass(frozen=True)
class Persistence(Scorer):
    """Score = minus the rows, among the last ``history``, that gave a key less than an even share.

    Serves ``scissorhands`` (Liu et al. 2023, arXiv:2305.17118, section 4 and algorithm 2): a key
    that was seldom unimportant is expected to stay important. An even share is 1 / the keys that
    the row sees of those held now; a row before a key counts neither for nor against it.

    Differences: rows are renormalised over what is held at the decision, where the original takes
    them as they were; counts are a mean over the query heads of a KV head (the original has one);
    4 sinks stay (original: none); a decision each 64 tokens evicts down to the budget, where the
    original drops half of the cache whenever it is full; 64 rows (original: 400) by default, since
    attention of all of them is in memory at once.

    Parameters
    ----------
    history
        Rows that are looked at.
    """

    history: int = 64

    presets: ClassVar = (
        Preset(
            name="scissorhands",
            sinks=4,
            recent="10",
            schedule=(("every", "64"), ("from", "prompt")),
        ),
    )

    def __post_init__(self) -> None:
        if self.history < 1:
            msg = f"history={self.history} is a number of rows, at least 1."
            raise UsageError(msg)

    @property
    def needs(self) -> Needs:
        """The newest rows' attention."""
        return Needs(last_queries=self.history)

    def score(self, view: View) -> torch.Tensor:
        """Return minus the mean counts, [N, L, G, K]."""
        # An exactly even share must not count as low for its last bit: float32 decides.
        attention_NLHQK = view.last_attention_NLHQK.float()
        attention_NLGMQK = attention_NLHQK.unflatten(2, (-1, view.layer.group_size))
        seen_NLGQK = view.last_seen_NLGQK
        share_NLGQ1 = 1 / seen_NLGQK.sum(-1, keepdim=True)
        is_low_NLGMQK = attention_NLGMQK < share_NLGQ1[:, :, :, None]
        is_low_NLGMQK &= seen_NLGQK[:, :, :, None]
        low_NLGK: torch.Tensor = is_low_NLGMQK.sum(-2).float().mean(3)
        return -low_NLGK
