"""Keys and values as the cache holds them: as written, transformed, turned to their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tracekit.errors import UsageError
from tracekit.kv.packed import cache_order
from tracekit.kv.rows import Rows
from tracekit.kv.scorer import Needs
from tracekit.kv.transform import Entries
from tracekit.measure.rope import rotate

if TYPE_CHECKING:
    from tracekit.kv.policy import Policy
    from tracekit.kv.transform import Fitted, Transform
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
        self._shift_LGK = torch.zeros(1, 1, 0, dtype=torch.int64)
        self._has_turned = False
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
        self._shift_LGK = _grown(self._shift_LGK, key_LGQD)
        self.closed_LGK = _grown(self.closed_LGK, key_LGQD)

    def room(self, held_NLGK: torch.Tensor) -> int:
        """Return how many rows may be read before entries close.

        A head that is to lose entries to the window meanwhile may close later, never earlier.

        Parameters
        ----------
        held_NLGK
            bool, N = 1: keys that are there.
        """
        if self._transform is None:
            return UNBOUNDED
        num_open = int((held_NLGK[0] & ~self.closed_LGK).sum(-1).max())
        return self._transform.residual + self._transform.num_together - num_open

    def fit(self, view: View) -> None:
        """Let the transform learn what it needs, at the first decision."""
        if self._transform is not None:
            self._fitted = self._transform.fit(view)

    def close(self, held_NLGK: torch.Tensor) -> None:
        """Store the oldest open entries, as many together as the transform wants.

        Parameters
        ----------
        held_NLGK
            bool, N = 1: evicted entries are never stored, so that a group is one of the cache.
        """
        transform = self._transform
        if transform is None:
            return
        open_LGK = held_NLGK[0] & ~self.closed_LGK
        over_LG = (open_LGK.sum(-1) - transform.residual).clamp(min=0)
        count_LG = over_LG // transform.num_together * transform.num_together
        for count in count_LG.unique().tolist():
            if count:
                layer_X, head_X = (count_LG == count).nonzero(as_tuple=True)
                self._close(transform, open_LGK, count, (layer_X[:, None], head_X[:, None]))
        self._turn(open_LGK & self.closed_LGK)

    def turn(self, evicted_NLGK: torch.Tensor) -> None:
        """Move the keys that are left next to each other: each by what was evicted after it.

        Queries stay where they are: attention sees distances alone. A window may take more from
        one head than from another, whose keys then all end next to the query; its place is that of
        the longest head.

        Parameters
        ----------
        evicted_NLGK
            bool, N = 1: what decisions have evicted so far.

        Raises
        ------
        UsageError
            If heads evict unequal numbers at the first decision, when all hold the same: they
            have unequal budgets.
        """
        if not self._turns:
            return
        gone_LGK = evicted_NLGK[0].long()
        total_LG = gone_LGK.sum(-1)
        if not self._has_turned and bool((total_LG != total_LG[:, :1]).any()):
            msg = "positions=cache needs heads of one length in each layer: choose another budget."
            raise UsageError(msg)
        shift_LGK = total_LG[..., None] - gone_LGK.cumsum(-1)
        is_moved_LGK = (shift_LGK != self._shift_LGK) & ~evicted_NLGK[0]
        self._shift_LGK, self._has_turned = shift_LGK, True
        self._turn(is_moved_LGK)

    def _turn(self, which_LGK: torch.Tensor) -> None:
        """Turn some keys anew, from where they stand in the text, so that no rounding adds up."""
        if not self._turns or self._rope is None:
            return
        place = which_LGK.nonzero(as_tuple=True)
        turned_XD = rotate(self._key.all[place], self._shift_LGK[place], self._rope)
        self._turned_key.all[place] = turned_XD

    def _close(
        self,
        transform: Transform,
        open_LGK: torch.Tensor,
        count: int,
        heads: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Store the first ``count`` open entries of X heads, given as layers and KV heads [X, 1]."""
        layer_X1, head_X1 = heads
        open_XK = open_LGK[layer_X1[:, 0], head_X1[:, 0]]
        place = (layer_X1, head_X1, cache_order(open_XK)[:, :count])
        at_X = (layer_X1 * open_LGK.shape[1] + head_X1)[:, 0]
        key_XCD, value_XCD = transform.store(
            Entries(
                key_XCD=self._key.all[place],
                value_XCD=self._value.all[place],
                position_XC=place[-1],
                fitted=tuple(part[at_X] for part in self._fitted),
                rope=self._rope,
            )
        )
        self._key.all[place] = key_XCD
        self._value.all[place] = value_XCD
        self.closed_LGK[place] = True


def _grown(of_LGK: torch.Tensor, key_LGQD: torch.Tensor) -> torch.Tensor:
    """Return numbers of all keys with zeros for new ones."""
    here_LGK = of_LGK.to(key_LGQD.device).expand(*key_LGQD.shape[:2], -1)
    return pad(here_LGK, (0, key_LGQD.shape[-2]))
