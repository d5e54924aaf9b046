"""What an estimator may learn from: the texts of prompts other than the one it is tried on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tracekit.errors import InputError, TracekitError
from tracekit.measure.memo import Memo

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from tracekit.vocab.controller import Run

FOLDS = 5
"""Parts into which prompts are split for what is fitted on hidden states."""

NUM_EXAMPLES = 16_384
"""Most steps that are learned from, spread evenly over those that there are."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class Text:
    """One sequence of a trace, as other prompts' estimators and controllers may learn from it.

    Parameters
    ----------
    sequence_id, prompt_id, domain
        Who it is.
    token_ids_T
        Its tokens, int64.
    is_generated_T
        Which of them the model made.
    scored_S
        Rows of its scored steps; row t predicts token t + 1.
    hidden
        Reads its final hidden states [T, E].
    runs
        Reads what the head's runs gave, oldest first, and how many of them each scored step saw.
    """

    sequence_id: str
    prompt_id: str
    domain: str
    token_ids_T: torch.Tensor
    is_generated_T: torch.Tensor
    scored_S: torch.Tensor
    hidden: Callable[[], torch.Tensor]
    runs: Callable[[], tuple[list[Run], list[int]]]


@dataclass(frozen=True, eq=False)
class Corpus:
    """All texts of a trace, from which any prompt can be taken out.

    Parameters
    ----------
    texts
        The sequences.
    num_rows
        V, rows of the head.

    Raises
    ------
    InputError
        If a token id has no row.
    """

    texts: tuple[Text, ...]
    num_rows: int
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    def __post_init__(self) -> None:
        for text in self.texts:
            wrong = text.token_ids_T[(text.token_ids_T < 0) | (text.token_ids_T >= self.num_rows)]
            if len(wrong):
                msg = (
                    f"token id {int(wrong[0])} of {text.sequence_id} has no row in a head of "
                    f"{self.num_rows}: validate the trace."
                )
                raise InputError(msg)

    @cached_property
    def folds(self) -> dict[str, int]:
        """Fold of each prompt: its place among all prompts, in turn."""
        prompts = sorted({one.prompt_id for one in self.texts})
        return {prompt: place % FOLDS for place, prompt in enumerate(prompts)}

    def without(self, prompt_id: str, domain: str = "") -> Others:
        """Return all texts but those of one prompt, whose domain is given."""
        rest = tuple(one for one in self.texts if one.prompt_id != prompt_id)
        return Others(prompt_id, domain, rest, self)


@dataclass(frozen=True, eq=False)
class Others:
    """Texts for one prompt's estimators, its own left out.

    Parameters
    ----------
    prompt_id, domain
        Of the prompt that is evaluated.
    texts
        All sequences of other prompts.
    corpus
        Where they come from; keeps what was fitted.

    Raises
    ------
    TracekitError
        If a text is of the prompt itself.
    """

    prompt_id: str
    domain: str
    texts: tuple[Text, ...]
    corpus: Corpus

    def __post_init__(self) -> None:
        if any(one.prompt_id == self.prompt_id for one in self.texts):
            msg = f"prompt {self.prompt_id!r} is among its own others: leave it out."
            raise TracekitError(msg)

    def fitted(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what is fitted on ``texts``, once a prompt."""
        return self.corpus.memo.get(("prompt", self.prompt_id, key), make)

    @property
    def fold(self) -> int:
        """Fold of the prompt; a prompt that has no text is of the first."""
        return self.corpus.folds.get(self.prompt_id, 0)

    def fitted_by_fold(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what is fitted on ``examples``, once a fold: prompts of a fold share it."""
        return self.corpus.memo.get(("fold", self.fold, key), make)

    def examples(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield steps to learn from, of prompts outside the prompt's own fold.

        Yields
        ------
        tuple of Tensor
            Final hidden states [X, E] of one text's steps, and the tokens that came, int64 [X]. At
            most ``NUM_EXAMPLES`` in all, spread evenly.
        """
        texts = [one for one in self.texts if self.corpus.folds[one.prompt_id] != self.fold]
        total = sum(len(one.scored_S) for one in texts)
        stride = -(-total // NUM_EXAMPLES) or 1
        for text in texts:
            rows_X = text.scored_S[::stride]
            if len(rows_X):
                yield text.hidden()[rows_X], text.token_ids_T[rows_X + 1]

    def counts(self, chosen: Callable[[Text], torch.Tensor]) -> torch.Tensor:
        """Return how often each token came, int64 [V].

        Parameters
        ----------
        chosen
            Returns the counted token ids of a text.
        """
        ids_X = torch.cat([torch.empty(0, dtype=torch.int64), *map(chosen, self.texts)])
        return torch.bincount(ids_X, minlength=self.corpus.num_rows)


def example_rows(others: Others) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all steps to learn from together, [X, E] and [X].

    Raises
    ------
    InputError
        If there is none.
    """
    parts: list[Any] = list(others.examples())
    if not parts:
        msg = (
            f"no other prompt has a decoded step to learn from for prompt {others.prompt_id!r}: "
            "record more prompts, or more tokens of each."
        )
        raise InputError(msg)
    return torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])
