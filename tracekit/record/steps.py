"""Derive the table of steps of one sequence from its final hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit.measure.logits import step_statistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.head import Head

BLOCK_BYTES = 32 << 20
"""Size of one block of logits."""

TOP_K = 20
"""Most likely tokens that are stored by id."""


def step_columns(
    hidden_TE: torch.Tensor,
    targets: Sequence[int],
    head: Head,
    *,
    num_tokens: int,
    entropy_before: float = float("nan"),
) -> dict[str, Any]:
    """Return the statistics columns of ``schema.STEPS``, one row a hidden state.

    Parameters
    ----------
    hidden_TE
        Final hidden states.
    targets
        The token that came after each.
    head
        The language-model head.
    num_tokens
        Entries of the tokenizer: logits beyond are padding.
    entropy_before
        Entropy of the step before the first, NaN if there is none.

    Returns
    -------
    dict
        Arrays of T rows.
    """
    hidden_TE = hidden_TE.to(head.weight_VE.device)
    targets_T = torch.tensor(targets, device=hidden_TE.device)
    size = max(1, BLOCK_BYTES // (4 * head.spec.num_rows))
    blocks = [
        step_statistics(
            head.logits(hidden_TE[start : start + size]),
            targets_T[start : start + size],
            num_tokens=num_tokens,
            top_k=TOP_K,
        )
        for start in range(0, len(hidden_TE), size)
    ]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    entropy = columns["entropy_nats"]
    columns["entropy_change"] = np.diff(entropy, prepend=np.float32(entropy_before))
    return columns
