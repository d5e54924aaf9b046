"""What an estimator may learn from a trace: token counts of the prompts other than its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tracekit.errors import InputError, TracekitError


@dataclass(frozen=True, eq=False)
class OtherPrompts:
    """Token counts for one prompt's estimators, made without that prompt.

    Parameters
    ----------
    prompt_id
        The prompt that is evaluated.
    counted
        Prompts that were counted.
    counts_V
        How often each token came there, int64 [V].

    Raises
    ------
    TracekitError
        If the prompt is among those that were counted.
    """

    prompt_id: str
    counted: frozenset[str]
    counts_V: torch.Tensor

    def __post_init__(self) -> None:
        if self.prompt_id in self.counted:
            msg = f"prompt {self.prompt_id!r} was counted for its own evaluation: leave it out."
            raise TracekitError(msg)


@dataclass(frozen=True, eq=False)
class Fit:
    """Token counts of a whole trace, from which any one prompt can be taken out again.

    Parameters
    ----------
    counts_V
        Over all prompts, int64 [V].
    tokens_by_prompt
        Token ids of each prompt.
    """

    counts_V: np.ndarray
    tokens_by_prompt: dict[str, np.ndarray]

    @classmethod
    def count(cls, token_ids_X: np.ndarray, prompt_ids_X: np.ndarray, *, num_rows: int) -> Fit:
        """Count the tokens of all prompts.

        Parameters
        ----------
        token_ids_X
            Token ids [X], of all sequences together.
        prompt_ids_X
            Prompt id of each, strings [X]; all samples of a prompt are one.
        num_rows
            V, rows of the head.

        Raises
        ------
        InputError
            If a token id has no row.
        """
        token_ids_X = np.asarray(token_ids_X, dtype=np.int64)
        if len(wrong := token_ids_X[(token_ids_X < 0) | (token_ids_X >= num_rows)]):
            msg = f"token id {wrong[0]} has no row in a head of {num_rows}: validate the trace."
            raise InputError(msg)
        prompts, code_X = np.unique(np.asarray(prompt_ids_X, dtype=str), return_inverse=True)
        sorted_X = token_ids_X[np.argsort(code_X, kind="stable")]
        ends = np.cumsum(np.bincount(code_X, minlength=len(prompts)))
        parts = np.split(sorted_X, ends[:-1])
        tokens = {str(prompt): part for prompt, part in zip(prompts, parts, strict=False)}
        return cls(np.bincount(token_ids_X, minlength=num_rows), tokens)

    def without(self, prompt_id: str) -> OtherPrompts:
        """Return the counts of all prompts but one, with all its samples taken out."""
        own_X = self.tokens_by_prompt.get(prompt_id, np.empty(0, dtype=np.int64))
        counts_V = self.counts_V - np.bincount(own_X, minlength=len(self.counts_V))
        counted = frozenset(self.tokens_by_prompt) - {prompt_id}
        return OtherPrompts(prompt_id, counted, torch.from_numpy(counts_V))
