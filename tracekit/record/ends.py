"""What one sequence of a batch asks for, where it ends, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Watcher(Protocol):
    """Who follows a generation token by token.

    Both methods get all ids so far [B, C], padding included, and the column of each sequence's last
    token as far as it is known: that token is not run, and rows from there on belong to nobody.
    """

    def begin(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn of the prompts before they are run."""

    def told(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn of a new token of each sequence."""


class Unwatched:
    """Nobody follows."""

    def begin(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Do nothing."""

    def told(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What one sequence of a batch asks for: its ids so far, its most new tokens, its seed."""

    ids: Sequence[int]
    max_new_tokens: int
    seed: int


class Ends:
    """A stopping criterion that knows where each sequence of a batch ends.

    Parameters
    ----------
    wishes
        What was asked for.
    pads
        Columns of padding before each sequence.
    stop_ids
        Tokens that end a sequence.
    watcher
        Told of each token.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        pads: Sequence[int],
        stop_ids: set[int],
        watcher: Watcher,
    ) -> None:
        self._stop_ids = stop_ids
        self._watcher = watcher
        # The last token that a sequence may have is not run through the model.
        self.last_columns = [
            pad + len(wish.ids) + wish.max_new_tokens - 1
            for wish, pad in zip(wishes, pads, strict=True)
        ]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return which sequences have ended, bool [B]."""
        column = input_ids.shape[1] - 1
        for b, token in enumerate(input_ids[:, -1].tolist()):
            if token in self._stop_ids and column < self.last_columns[b]:
                self.last_columns[b] = column
        self._watcher.told(input_ids, self.last_columns)
        done = [column >= last for last in self.last_columns]
        return torch.tensor(done, device=input_ids.device)
