"""Heads get what a file says that they are worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.errors import InputError, UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.head_file import hash_of, read_head_file
from tracekit.kv.scorer import Preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch


@LAYER_BUDGETS.register("heads_file")
@dataclass(frozen=True)
class HeadsFile(LayerBudget):
    """A part of the budget goes to all heads evenly, the rest in proportion to a file's numbers.

    Serves ``headkv`` (HeadKV, Fu et al. 2024, arXiv:2410.19258, section 3.3), with the score of
    SnapKV and numbers that say how much a head retrieves and reasons; ``head_floor`` is
    1 - 1 / beta there. Differences: one number a KV head, where the original has one a query head
    and holds the cache of each; entries are rounded so that the sum is exact, where the original
    rounds each.

    Parameters
    ----------
    file
        Path of a JSON or TSV file: rows are layers, columns are KV heads, numbers not negative.
    head_floor
        Part of the budget that all heads get, in [0, 1].
    """

    file: str = ""
    head_floor: float = 0.2

    presets: ClassVar = (
        Preset(
            name="headkv",
            what="SnapKV's score, entries by how much a file says that a head retrieves",
            scorer="window_attention",
            recent="window",
            items=(("layers", "heads_file"), ("file", ""), ("head_floor", "0.2")),
        ),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.head_floor <= 1:
            msg = f"head_floor={self.head_floor} is a part of the budget, in [0, 1]."
            raise UsageError(msg)

    @property
    def content(self) -> str:
        """The hash of the file."""
        return hash_of(self.file)

    def require(self, cache: Cache) -> None:
        """Raise if the file is missing, or is not as it must be."""
        self._number_X(cache)

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return floor + (1 - floor) * number / mean of the numbers.

        Raises
        ------
        UsageError
            If no file is named.
        InputError
            If the file is not as it must be, a number is negative, or none is above 0.
        """
        del budget, num_tokens, observed
        number_X = self._number_X(cache)
        return cache.by_layer(self.head_floor + (1 - self.head_floor) * number_X / number_X.mean())

    def _number_X(self, cache: Cache) -> np.ndarray:
        """Return the file's numbers, of which at least one is above 0."""
        number_X = read_head_file(self.file, cache.layers, least=0)
        if number_X.max() == 0:
            msg = f"head file {self.file} has no number above 0: write what each head is worth."
            raise InputError(msg)
        return number_X
