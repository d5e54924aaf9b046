"""Heads that retrieve keep everything, the others their first and newest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tracekit.errors import UsageError
from tracekit.kv.budget import LAYER_BUDGETS, Cache, LayerBudget
from tracekit.kv.head_file import hash_of, read_head_file
from tracekit.kv.scorer import Preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@LAYER_BUDGETS.register("retrieval_heads")
@dataclass(frozen=True)
class RetrievalHeads(LayerBudget):
    """In the order of a file's numbers heads get all entries, until the bytes are spent.

    Serves ``duoattention`` (DuoAttention, Xiao et al. 2024, arXiv:2410.10819, section 3): heads of
    the largest numbers are retrieval heads, all others keep ``stream`` entries, 64 sinks and 256 of
    the newest by default. Differences: the original sets the number of retrieval heads, here it
    follows from ``kept``, and the head at which the bytes end gets what is left; it treats the
    prompt so from its first token on, here it is read in full before the first decision. Where all
    heads' ``stream`` entries are more than the total, all heads get the same.

    Parameters
    ----------
    file
        Path of a JSON or TSV file: rows are layers, columns are KV heads (DuoAttention's own).
    stream
        Entries that a head without retrieval keeps, sinks included, at least 1.
    """

    file: str = ""
    stream: int = 320

    presets: ClassVar = (
        Preset(
            name="duoattention",
            what="All keys in a file's retrieval heads, sinks and the newest in the others",
            scorer="recency",
            sinks=64,
            items=(("layers", "retrieval_heads"), ("file", ""), ("stream", "320")),
        ),
    )

    def __post_init__(self) -> None:
        if self.stream < 1:
            msg = f"stream={self.stream} must be at least 1 entry."
            raise UsageError(msg)

    @property
    def content(self) -> str:
        """The hash of the file."""
        return hash_of(self.file)

    def require(self, cache: Cache) -> None:
        """Raise if the file is missing, or is not as it must be."""
        read_head_file(self.file, cache.layers)

    def plan(
        self, cache: Cache, budget: int, num_tokens: int, observed: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return all entries for the first heads in order (the first among equals), few for others.

        Raises
        ------
        UsageError
            If no file is named.
        InputError
            If the file is not as it must be.
        """
        del observed
        number_X = read_head_file(self.file, cache.layers)
        size_X, most_X = cache.size_X, cache.most_X(num_tokens)
        few_X = np.minimum(min(budget, self.stream), most_X)
        order = np.argsort(-number_X, kind="stable")
        more = ((most_X - few_X) * size_X)[order]
        left = cache.num_bytes(budget, num_tokens) - int(size_X @ few_X)
        spent_before = np.cumsum(more) - more
        given = np.clip(left - spent_before, 0, more)
        entries_X = few_X.astype(np.float64)
        entries_X[order] += given / size_X[order]
        return cache.by_layer(entries_X)
