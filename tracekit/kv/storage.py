"""Keys and values as the cache holds them: as written, transformed, turned to their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.rows import Rows
from tracekit.kv.scorer import Needs
from tracekit.measure.rope import rotate

if TYPE_CHECKING:
    from tracekit.kv.policy import Policy
    from tracekit.kv.transform import Fitted
    from tracekit.kv.view import View
    from tracekit.spec import RopeSpec

UNBOUNDED = 2**31
"""``room`` where nothing ever closes."""


class Storage:
    """Entries of a stack of layers. One policy where a transform or a turn makes them its own.

    Parameters
    ----------
    policy
        Its ``transform`` and ``positions``.
    rope
        Rotary embedding of the layers; None if they have none.
    """

    needs = Needs(keys=True, values=True)
    """What a transform may read when it is fitted."""

    def __init__(self, policy: Policy, rope: RopeSpec | None) -> None:
        self._transform = policy.transform
        self._turns = policy.positions == "cache" and rope is not None
        self._rope = rope
        self._key, self._value = Rows(), Rows()
        self._turned_key = Rows()
        self._shift_LGK: torch.Tensor | None = None
        self._fitted: Fitted = ()
        self.closed_LGK = torch.zeros(1, 1, 0, dtype=torch.bool)

    @property
    def key_LGKD(self) -> torch.Tensor:
        """Keys as attention reads them."""
        return self._turned_key.all if self._turns else self._key.all

    @property
    def unturned_key_LGKD(self) -> torch.Tensor:
        """Keys at their place in the text."""
        return self._key.all

    @property
    def value_LGKD(self) -> torch.Tensor:
        """Values as attention reads them."""
        return self._value.all

    def append(self, key_LGQD: torch.Tensor, value_LGQD: torch.Tensor) -> None:
        """Take the entries of the next rows, as written."""
        if self._transform is not None:  # they are written over, and must not be the caller's
            key_LGQD, value_LGQD = key_LGQD.clone(), value_LGQD.clone()
        self._key.append(key_LGQD)
        self._value.append(value_LGQD)
        if self._turns:
            self._turned_key.append(key_LGQD.clone())
        closed_LGK = self.closed_LGK.to(key_LGQD.device).expand(*key_LGQD.shape[:2], -1)
        self.closed_LGK = pad(closed_LGK, (0, key_LGQD.shape[-2]))

    def room(self, held_NLGK: torch.Tensor) -> int:
        """Return how many rows may be read before entries close."""
        if self._transform is None:
            return UNBOUNDED
        pending = int((held_NLGK[0] & ~self.closed_LGK).sum(-1).max())
        return max(1, self._transform.residual + self._transform.group - pending)

    def fit(self, view: View) -> None:
        """Let the transform learn what it needs, at the first decision."""
        if self._transform is not None:
            self._fitted = self._transform.fit(view)

    def close(self, held_NLGK: torch.Tensor) -> None:
        """Store the oldest open entries in whole groups, the residual window aside."""
        transform = self._transform
        if transform is None:
            return
        pending_XK = (held_NLGK[0] & ~self.closed_LGK).flatten(0, 1)
        over_X = (pending_XK.sum(-1) - transform.residual).clamp(min=0)
        count_X = over_X // transform.group * transform.group
        for count in count_X.unique().tolist():
            if count:
                self._close(pending_XK, count, (count_X == count).nonzero()[:, 0])
        self._turn()

    def turn(self, evicted_NLGK: torch.Tensor) -> None:
        """Move the keys that are left next to each other: each by what was evicted after it.

        Queries stay where they are: attention sees distances alone.

        Raises
        ------
        UsageError
            If the heads of a layer hold unequal numbers: a query has one position.
        """
        if not self._turns:
            return
        gone_LGK = evicted_NLGK[0].long()
        total_LG = gone_LGK.sum(-1)
        if bool((total_LG != total_LG[:, :1]).any()):
            msg = "positions=cache needs heads of one length in each layer: choose another budget."
            raise UsageError(msg)
        self._shift_LGK = gone_LGK.flip(-1).cumsum(-1).flip(-1) - gone_LGK
        self._turn()

    def _turn(self) -> None:
        """Turn all keys anew; keys that were written since the last decision have no shift."""
        if not self._turns or self._shift_LGK is None or self._rope is None:
            return
        key_LGKD = self._key.all
        shift_LGK = pad(self._shift_LGK, (0, key_LGKD.shape[-2] - self._shift_LGK.shape[-1]))
        self._turned_key.all.copy_(rotate(key_LGKD, shift_LGK, self._rope))

    def _close(self, pending_XK: torch.Tensor, count: int, heads_X: torch.Tensor) -> None:
        """Store the first ``count`` open entries of some heads."""
        if self._transform is None:
            return
        position_XC = (~pending_XK[heads_X]).to(torch.uint8).sort(dim=-1, stable=True).indices
        position_XC = position_XC[:, :count]
        rows = []
        for stored in (self._key, self._value):
            all_XKD = stored.all.flatten(0, 1)[heads_X]
            index_XCD = position_XC[..., None].expand(-1, -1, all_XKD.shape[-1])
            rows.append((stored, index_XCD, all_XKD.gather(1, index_XCD)))
        fitted = tuple(part[heads_X] for part in self._fitted)
        back = self._transform.store(rows[0][2], rows[1][2], position_XC, fitted)
        for (stored, index_XCD, _), entry_XCD in zip(rows, back, strict=True):
            self._write(stored, heads_X, index_XCD, entry_XCD)
        closed_XK = self.closed_LGK.flatten(0, 1)
        closed_XK[heads_X] = closed_XK[heads_X].scatter(-1, position_XC, value=True)
        self.closed_LGK = closed_XK.reshape(self.closed_LGK.shape)

    @staticmethod
    def _write(
        rows: Rows, heads_X: torch.Tensor, index_XCD: torch.Tensor, entry_XCD: torch.Tensor
    ) -> None:
        all_LGKD = rows.all
        groups = all_LGKD.shape[1]
        for x, index_CD, entry_CD in zip(heads_X.tolist(), index_XCD, entry_XCD, strict=True):
            all_LGKD[x // groups, x % groups].scatter_(0, index_CD, entry_CD.to(all_LGKD))
