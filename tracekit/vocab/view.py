"""What is known at a step before its head runs; an estimator sees the part that it declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from tracekit.errors import TracekitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tracekit.measure.head import Head
    from tracekit.vocab.fit import OtherPrompts


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an estimator reads, all of it known before the head runs.

    Parameters
    ----------
    hidden
        The final hidden state h_t, the head's own input.
    tokens
        Token ids up to t.
    counts
        Token counts of other prompts.
    head
        The head's weight, a fixed parameter.
    previous
        Most likely tokens of earlier steps, so many a step; 0 for none.
    """

    hidden: bool = False
    tokens: bool = False
    counts: bool = False
    head: bool = False
    previous: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """Facts about a run of scored steps, from which a view shows a part.

    Parameters
    ----------
    hidden_SE
        Final hidden states of the steps, float [S, E].
    token_ids_T
        Token ids up to the last of the steps, int64.
    rows_S
        Row of each step, ascending: step s has read tokens 0 ... rows_S[s].
    top_RM
        Most likely tokens of the head's runs before the last step, oldest first, int64 [R, M].
    num_runs_S
        How many of these runs lie before each step.
    head
        The head.
    fit
        Token counts of other prompts.
    """

    hidden_SE: torch.Tensor
    token_ids_T: torch.Tensor
    rows_S: torch.Tensor
    top_RM: torch.Tensor
    num_runs_S: torch.Tensor
    head: Head
    fit: OtherPrompts


@final
class View:
    """What one estimator may read about a run of steps; all else raises.

    Parameters
    ----------
    known
        The facts.
    needs
        What the estimator declared.
    owner
        Its text, for messages.
    """

    def __init__(self, known: Known, needs: Needs, owner: str) -> None:
        self._known = known
        self._needs = needs
        self._owner = owner

    @property
    def num_steps(self) -> int:
        """Steps S to rank candidates for."""
        return len(self._known.rows_S)

    @property
    def hidden_SE(self) -> torch.Tensor:
        """Final hidden state of each step; row s is for step s alone."""
        self._require("hidden", declared=self._needs.hidden)
        return self._known.hidden_SE

    @property
    def counts_V(self) -> torch.Tensor:
        """Token counts of other prompts, int64 [V]."""
        self._require("counts", declared=self._needs.counts)
        return self._known.fit.counts_V

    @property
    def head(self) -> Head:
        """The head: its weight is fixed before any step."""
        self._require("head", declared=self._needs.head)
        return self._known.head

    def token_ids(self, step: int) -> torch.Tensor:
        """Return the token ids that a step has read, its own input last."""
        self._require("tokens", declared=self._needs.tokens)
        return self._known.token_ids_T[: int(self._known.rows_S[step]) + 1]

    def previous_top(self) -> Iterator[torch.Tensor]:
        """Yield for each step what the head's runs since the step before found most likely.

        Yields
        ------
        Tensor
            int64 [N, M] with M = ``needs.previous`` (at most V), oldest run first, best token
            first. The first step gets all runs so far: the head also runs at the last position of
            a prompt, so a decoding step has one at least.
        """
        self._require("previous", declared=self._needs.previous > 0)
        start = 0
        for end in self._known.num_runs_S.tolist():
            yield self._known.top_RM[start:end, : self._needs.previous]
            start = end

    def _require(self, what: str, *, declared: bool) -> None:
        if not declared:
            msg = f"estimator {self._owner} reads {what!r} without declaring it in its needs."
            raise TracekitError(msg)
