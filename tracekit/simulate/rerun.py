"""A recorded sequence in the model again: run once under the full cache, then compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import InputError
from tracekit.kv.budget import Cache
from tracekit.kv.reference import Reference
from tracekit.kv.replay import Setting
from tracekit.live.run import full_run
from tracekit.measure.conventions import EXACT
from tracekit.measure.head import Head
from tracekit.measure.next_token import FullRows
from tracekit.model.head import head_tensors
from tracekit.simulate.kv import Recorded
from tracekit.simulate.stacks import can_replay, influence_of, probed_layers

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.live.run import FullRun
    from tracekit.measure.conventions import Convention
    from tracekit.measure.token_rows import NextToken
    from tracekit.model.load import LoadedModel
    from tracekit.trace.reader import Trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Rerun:
    """A recorded sequence, run again under the full cache.

    Parameters
    ----------
    run
        The run, of all tokens but the last.
    recorded
        What the trace knows of the sequence.
    setting
        Where the sequence has its parts, and the layers that hold keys.
    target_T
        Token that came after each row, int64.
    """

    run: FullRun
    recorded: Recorded
    setting: Setting
    target_T: torch.Tensor

    def scored(self, point: int, convention: Convention = EXACT) -> Scored | None:
        """Return the rows from an eviction point on that count; None if there are none.

        The row at the point is the first that reads less, so it counts. A window of text does not
        score again what the window before it has scored.

        Parameters
        ----------
        point
            Tokens seen at the eviction point.
        convention
            How distributions are compared.
        """
        first = max(point, int(self.recorded.row["scored_from"]) - 1)
        return Scored(self, first, convention) if first < self.run.num_rows else None


def rerun(
    trace: Trace,
    loaded: LoadedModel,
    sequence: pd.Series[Any],
    *,
    seed: int,
    bytes_per_number: int = 2,
    probes: bool = False,
) -> Rerun | None:
    """Return a recorded sequence, run again from its token ids; None if it is a single token.

    Parameters
    ----------
    trace
        Of any capture.
    loaded
        Its model.
    sequence
        Its row of ``trace.sequences``.
    seed
        Of random policies on this sequence.
    bytes_per_number
        Bytes of one number of the cache, for the accounting.
    probes
        Read influence probes too, for rules that score by them.

    Raises
    ------
    InputError
        If a token is none of the model's.
    ModelError
        If the model is not that of the trace, or eviction cannot be run inside it.
    """
    loaded.require(trace.spec)
    recorded = Recorded.of(trace, sequence)
    tokens = trace.table("tokens", sequence_id=recorded.sequence_id, columns=["token_id"])
    ids = [int(one) for one in tokens["token_id"]]
    if len(ids) < 2:
        return None
    most = len(loaded.model.get_input_embeddings().weight)
    if strange := [one for one in ids if not 0 <= one < most]:
        msg = (
            f"{recorded.sequence_id} has token {strange[0]}, but {loaded.spec.name} has {most} of "
            "them: the trace does not belong to this model."
        )
        raise InputError(msg)
    run = full_run(loaded, ids[:-1])
    if probes:
        run = _with_probes(run, trace, recorded.sequence_id)
    cache = Cache(tuple(one for one in loaded.spec.layers if can_replay(one)), bytes_per_number)
    return Rerun(
        run=run,
        recorded=recorded,
        setting=Setting(layers=(), cache=cache, spans=recorded.spans, seed=seed),
        target_T=torch.tensor(ids[1:], device=run.ids_1T.device),
    )


def _with_probes(run: FullRun, trace: Trace, sequence_id: str) -> FullRun:
    """Return a run whose layers know the probes that were recorded of them."""
    probed = probed_layers(trace, sequence_id)
    references = {
        number: Reference(
            query_LHTD=one.query_LHTD,
            key_LGTD=one.key_LGTD,
            value_LGTD=one.value_LGTD,
            layer=one.layer,
            rope=one.rope,
            **(influence_of(trace, sequence_id, [number]) if number in probed else {}),
        )
        for number, one in run.references.items()
    }
    return replace(run, references=references)


class Scored:
    """Rows of a sequence that count, and their distributions under the full cache.

    Parameters
    ----------
    rerun
        The sequence.
    first_row
        Position of the first row that counts.
    convention
        How distributions are compared.
    """

    def __init__(self, rerun: Rerun, first_row: int, convention: Convention = EXACT) -> None:
        run = rerun.run
        tensors = head_tensors(run.loaded.model)
        self._head = Head(tensors["head.weight"], tensors.get("head.bias"), run.spec.head)
        self._convention = convention
        self.first_row = first_row
        self.num_rows = run.num_rows - first_row
        self._target_R = rerun.target_T[first_row:]
        self._full = self._rows(run.hidden_TE[first_row:])

    def compare(self, hidden_XE: torch.Tensor) -> NextToken:
        """Return the measures of the rows that count, of final hidden states that end with them."""
        return self._full.compare(hidden_XE[-self.num_rows :])

    def between(self, hidden_XE: torch.Tensor, other_XE: torch.Tensor) -> NextToken:
        """Return the measures of one run under a reduced cache, read as the full one, and another."""
        return self._rows(hidden_XE[-self.num_rows :]).compare(other_XE[-self.num_rows :])

    def _rows(self, hidden_RE: torch.Tensor) -> FullRows:
        return FullRows(hidden_RE, self._head, self._target_R, convention=self._convention)
