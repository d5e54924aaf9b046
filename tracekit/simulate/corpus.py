"""A trace as candidate sets see it: texts to learn from, and sequences to be tried on."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit.errors import InputError
from tracekit.measure.attention import logits_HQK, weights_HQK
from tracekit.measure.tensors import to_torch
from tracekit.vocab.blocks import runs_of
from tracekit.vocab.controller import Run
from tracekit.vocab.others import Corpus, Text
from tracekit.vocab.view import Sequence

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.simulate.weights import Weights
    from tracekit.trace.block import Block
    from tracekit.trace.reader import Trace

_STATES = ("entropy_nats", "varentropy", "free_energy", "internal_energy", "surprisal_nats")


def read_corpus(trace: Trace) -> Corpus:
    """Return the texts of a trace; hidden states are read when they are asked for.

    Raises
    ------
    InputError
        If a token id has no row in the head.
    """
    columns = ["sequence_id", "position", "is_scored", "path", *_STATES]
    steps = {str(name): part for name, part in _by_sequence(trace.table("steps", columns=columns))}
    tokens = trace.table("tokens", columns=["sequence_id", "token_id", "is_generated"])
    rows = {str(row["sequence_id"]): row for _, row in trace.sequences.iterrows()}
    texts = tuple(
        _text(trace, rows[str(name)], part, steps[str(name)])
        for name, part in _by_sequence(tokens)
        if str(name) in steps
    )
    return Corpus(texts, trace.spec.head.num_rows)


def read_sequence(trace: Trace, text: Text, weights: Weights) -> Sequence:
    """Return one sequence of a trace, to be tried on.

    Parameters
    ----------
    trace
        The trace.
    text
        The sequence.
    weights
        Gives the final norm.
    """
    name = text.sequence_id

    @cache
    def inputs(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = trace.attention_inputs(name, layer)
        query, key = (
            _finite(blocks[kind], f"the {kind} states of layer {layer}", name)
            for kind in ("query", "key")
        )
        return query, key

    def attention(layer: int, rows_S: torch.Tensor) -> torch.Tensor:
        spec = trace.spec.layers[layer]
        query_HTD, key_GTD = inputs(layer)
        key_GKD = key_GTD[:, : int(rows_S[-1]) + 1]
        key_K = torch.arange(key_GKD.shape[1])
        sees_SK = key_K <= rows_S[:, None]
        if spec.window is not None:
            sees_SK &= key_K > rows_S[:, None] - spec.window
        scores_HSK = logits_HQK(query_HTD[:, rows_S], key_GKD, spec)
        return weights_HQK(scores_HSK.masked_fill_(~sees_SK, -torch.inf), spec)

    @cache
    def residual(layer: int) -> torch.Tensor:
        states = _finite(trace.residual(name, layer), f"the hidden states of layer {layer}", name)
        return weights.norm.apply(states)

    return Sequence(
        hidden_TE=text.hidden(),
        token_ids_T=text.token_ids_T,
        scored_S=text.scored_S,
        attention=attention,
        residual=residual,
        runs=text.runs,
    )


def scored_rows(steps: pd.DataFrame, *, is_given: bool) -> np.ndarray:
    """Return the rows whose next token is scored, ascending.

    Of generated text those that a decoding step predicted: the first token comes out of the prompt's
    own pass, which runs the full head. Of given text all that count in their window.
    """
    counts = steps["is_scored"] & (is_given | (steps["path"].astype(str) == "decode"))
    rows: np.ndarray = np.sort(steps.loc[counts, "position"].to_numpy() - 1)
    return rows


def _finite(block: Block, what: str, name: str) -> torch.Tensor:
    """Return what was recorded; NaN and infinity would be ranked like numbers."""
    if not block.is_finite:
        msg = f"{what} of {name} hold NaN or infinity: record it again."
        raise InputError(msg)
    return to_torch(block.data, block.dtype)


def _by_sequence(frame: pd.DataFrame) -> Any:
    return frame.groupby("sequence_id", observed=True, sort=False)


def _text(trace: Trace, row: pd.Series[Any], tokens: pd.DataFrame, steps: pd.DataFrame) -> Text:
    name = str(row["sequence_id"])
    scored = scored_rows(steps, is_given=row["text_source"] == "given")
    scored_S = torch.tensor(scored.astype(np.int64))

    def hidden() -> torch.Tensor:
        return _finite(trace.hidden(name), "the final hidden states", name)

    return Text(
        sequence_id=name,
        prompt_id=str(row["prompt_id"]),
        domain=str(row["domain"]),
        token_ids_T=torch.tensor(tokens["token_id"].to_numpy(dtype=np.int64)),
        is_generated_T=torch.tensor(tokens["is_generated"].to_numpy(dtype=bool)),
        scored_S=scored_S,
        hidden=hidden,
        runs=partial(_runs, steps, scored_S, hidden),
    )


def _runs(steps: pd.DataFrame, scored_S: torch.Tensor, hidden: Any) -> tuple[list[Run], list[int]]:
    """Return what the head's runs gave, and how many of them lie before each scored step."""
    runs_R = runs_of(scored_S)
    states = steps.set_index("position").reindex(runs_R.numpy() + 1)
    values_NR = [states[name].to_numpy(np.float64).tolist() for name in _STATES]
    hidden_RE = hidden()[runs_R].float().numpy()
    runs = [Run(*one) for one in zip(*values_NR, hidden_RE, strict=True)]
    return runs, torch.searchsorted(runs_R, scored_S).tolist()
