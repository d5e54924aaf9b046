"""What is known at a step before its head runs; an estimator sees the part that it declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from tracekit.errors import TracekitError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tracekit.measure.head import Head
    from tracekit.measure.memo import Memo
    from tracekit.spec import HeadSpec
    from tracekit.vocab.controller import Run
    from tracekit.vocab.layers import LayerChoice
    from tracekit.vocab.others import Others


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an estimator reads, all of it known before the head runs.

    Parameters
    ----------
    hidden
        Final hidden states up to t, h_t, the head's own input, included.
    tokens
        Token ids up to t.
    head
        The head's weight, a fixed parameter.
    embedding
        The input embedding, a fixed parameter.
    others
        Texts of other prompts.
    attention
        Attention rows of t in these layers; None for none.
    residual
        Layer whose states, after the final norm, are read up to t; negative ones count from the
        top. None for none.
    previous
        Most likely tokens of earlier steps, so many a step; 0 for none.
    """

    hidden: bool = False
    tokens: bool = False
    head: bool = False
    embedding: bool = False
    others: bool = False
    attention: LayerChoice | None = None
    residual: int | None = None
    previous: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Decoder:
    """The parts of a model that estimators may use.

    Parameters
    ----------
    head
        The language-model head; keeps what is computed from it alone.
    embedding
        Reads the input embedding [V, E].
    num_layers
        Layers.
    pinned_P
        Ids that are always candidates, none twice.
    """

    head: Head
    embedding: Callable[[], torch.Tensor]
    num_layers: int
    pinned_P: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequence:
    """A recorded sequence, as estimators are tried on it.

    Parameters
    ----------
    hidden_TE
        Final hidden states; row t predicts token t + 1.
    token_ids_T
        Token ids, int64, one more than rows at least.
    scored_S
        Rows of the scored steps, ascending. The head ran at these rows and at the row before each
        of them (the last of a prompt), and nowhere else.
    attention
        Returns the attention of some rows in one layer, [H, S, K] with K = last row + 1.
    residual
        Returns the states [T, E] of one layer, after the final norm.
    runs
        Reads what the head's runs gave, oldest first, and how many of them lie before each scored
        step.
    """

    hidden_TE: torch.Tensor
    token_ids_T: torch.Tensor
    scored_S: torch.Tensor
    attention: Callable[[int, torch.Tensor], torch.Tensor]
    residual: Callable[[int], torch.Tensor]
    runs: Callable[[], tuple[list[Run], list[int]]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """Facts about some scored steps, from which a view shows a part.

    Parameters
    ----------
    sequence, decoder, others
        Where they come from.
    rows_S
        Row of each step, ascending: step s has read tokens 0 ... rows_S[s].
    top_RM
        Most likely tokens of the head's runs since the last step before these, oldest first, int64
        [R, M].
    num_runs_S
        How many of these runs lie before each step.
    memo
        What the views of these steps have computed.
    """

    sequence: Sequence
    decoder: Decoder
    others: Others
    rows_S: torch.Tensor
    top_RM: torch.Tensor
    num_runs_S: torch.Tensor
    memo: Memo


@final
class View:
    """What one estimator may read about some steps, in order; all else raises.

    Arrays over positions end with the last of the steps. A step s may use of them what stands up to
    its own row ``rows_S[s]``; that it does is tested for every estimator.

    Parameters
    ----------
    known
        The facts.
    needs
        What the estimator declared.
    owner
        Its text, for messages.
    memory
        What the estimator keeps from the steps before these, of the same sequence; empty at first.
    """

    def __init__(self, known: Known, needs: Needs, owner: str, memory: dict[str, Any]) -> None:
        self._known = known
        self._needs = needs
        self._owner = owner
        self.memory = memory

    @property
    def num_steps(self) -> int:
        """Steps S to rank candidates for."""
        return len(self._known.rows_S)

    @property
    def rows_S(self) -> torch.Tensor:
        """Row of each step: it has read tokens 0 ... rows_S[s], int64, ascending."""
        return self._known.rows_S

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._known.decoder.num_layers

    @property
    def head_spec(self) -> HeadSpec:
        """Shape of the head."""
        return self._known.decoder.head.spec

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a number of the head."""
        return self._known.decoder.head.weight_VE.element_size()

    @property
    def hidden_SE(self) -> torch.Tensor:
        """Final hidden state of each step; row s is for step s alone."""
        return self.hidden_TE[self._known.rows_S]

    @property
    def hidden_TE(self) -> torch.Tensor:
        """Final hidden states up to the last step."""
        self._require("hidden", declared=self._needs.hidden)
        return self._known.sequence.hidden_TE[: self._end]

    @property
    def token_ids_T(self) -> torch.Tensor:
        """Token ids up to the last step's own input, int64."""
        self._require("tokens", declared=self._needs.tokens)
        return self._known.sequence.token_ids_T[: self._end]

    @property
    def others(self) -> Others:
        """Texts of other prompts."""
        self._require("others", declared=self._needs.others)
        return self._known.others

    @property
    def head(self) -> Head:
        """The head: its weight is fixed before any step."""
        self._require("head", declared=self._needs.head)
        return self._known.decoder.head

    @property
    def embedding_VE(self) -> torch.Tensor:
        """The input embedding."""
        self._require("embedding", declared=self._needs.embedding)
        return self._known.decoder.embedding()

    def token_ids(self, step: int) -> torch.Tensor:
        """Return the token ids that a step has read, its own input last."""
        return self.token_ids_T[: int(self._known.rows_S[step]) + 1]

    def attention_SK(self) -> torch.Tensor:
        """Return the attention of each step, mean over the heads and layers declared.

        Returns
        -------
        Tensor
            float32 [S, K], 0 beyond a step's own row; the sink logits of a layer have the rest of 1.
        """
        choice = self._declared("attention", self._needs.attention)
        return self._known.memo.get(("attention", str(choice)), lambda: self._attended(choice))

    def residual_SE(self) -> torch.Tensor:
        """Return the state of each step in the layer declared, after the final norm."""
        layer = self._declared("residual", self._needs.residual)
        states_TE = self._known.sequence.residual(layer + self.num_layers if layer < 0 else layer)
        return states_TE[self._known.rows_S]

    def previous_top(self) -> Iterator[torch.Tensor]:
        """Yield for each step what the head's runs since the step before found most likely.

        Yields
        ------
        Tensor
            int64 [N, M] with M = ``needs.previous`` (at most V), oldest run first, best token
            first. The first step of a sequence gets all runs so far: the head also runs at the last
            position of a prompt, so a decoding step has one at least.
        """
        self._require("previous", declared=self._needs.previous > 0)
        start = 0
        for end in self._known.num_runs_S.tolist():
            yield self._known.top_RM[start:end, : self._needs.previous]
            start = end

    @property
    def _end(self) -> int:
        return int(self._known.rows_S[-1]) + 1

    def _attended(self, choice: LayerChoice) -> torch.Tensor:
        rows_S, count = self._known.rows_S, 0
        total_SK = torch.zeros((len(rows_S), self._end))
        for layer in choice.numbers(self.num_layers):
            weight_HSK = self._known.sequence.attention(layer, rows_S)
            heads = choice.heads(layer, self.num_layers, len(weight_HSK))
            total_SK += weight_HSK[list(heads)].sum(0)
            count += len(heads)
        return total_SK / count

    def _require(self, what: str, *, declared: bool) -> None:
        self._declared(what, declared or None)

    def _declared(self, what: str, need: T | None) -> T:
        """Return what was declared of a need."""
        if need is None:
            msg = f"{self._owner} reads {what!r} without declaring it in its needs."
            raise TracekitError(msg)
        return need
