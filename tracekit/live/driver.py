"""The later rows of a sequence through the model, with attention that somebody else computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tracekit.live.run import decode
from tracekit.model.resume import entered_at
from tracekit.model.steer import steered
from tracekit.model.versions import muted

if TYPE_CHECKING:
    from tracekit.live.run import FullRun
    from tracekit.model.steer import Steering


ROWS_AT_ONCE = 4096
"""Rows of all runs that go through the model side by side, unless one run alone has more."""


def runs_at_once(num_rows: int) -> int:
    """Return how many runs of so many rows go side by side, at least 1."""
    return max(1, ROWS_AT_ONCE // num_rows)


def drive(
    run: FullRun, steering: Steering, first_row: int, *, num_runs: int = 1, first_layer: int = 0
) -> torch.Tensor:
    """Run the rows of a sequence from one on anew, as so many runs as there are, side by side.

    Parameters
    ----------
    run
        The sequence under the full cache.
    steering
        Attends in the model's place; knows the keys of the rows before.
    first_row
        Position of the first row that is run.
    num_runs
        B runs of the same rows.
    first_layer
        Layer with which the pass begins: those below are as in ``run``.

    Returns
    -------
    Tensor
        Final hidden states [B, R, E] of the rows from ``first_row`` on.
    """
    ids_BR = run.ids_1T[:, first_row:].expand(num_runs, -1)
    entry = run.inputs[first_layer][..., first_row:, :]
    entry = entry.expand(*[-1] * (entry.ndim - 3), num_runs, -1, -1)
    model = run.loaded.model
    with (
        torch.no_grad(),
        muted(),
        steered(model, steering),
        entered_at(model, first_layer, entry),
    ):
        return decode(run.loaded, ids_BR, first_row)
