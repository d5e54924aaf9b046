"""Candidate sets on one recorded sequence, as rows of the results."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit import schema
from tracekit.measure.regimes import regimes
from tracekit.simulate.applicable import why_not
from tracekit.simulate.candidate_rows import candidate_tables
from tracekit.simulate.corpus import read_corpus, read_sequence
from tracekit.simulate.lengths import length_bucket
from tracekit.vocab.engine import evaluate, facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.simulate.weights import Weights
    from tracekit.trace.reader import Trace
    from tracekit.vocab.others import Corpus, Text
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Decoder

PINNED = ("special", "byte")
"""Token classes that are always candidates."""


class VocabReplay:
    """What all sequences of a trace share: the head, the pinned ids, the texts of prompts.

    Parameters
    ----------
    trace
        Recorded with final hidden states.
    weights
        The head and what belongs to it.
    """

    def __init__(self, trace: Trace, weights: Weights) -> None:
        self._trace, self._weights = trace, weights

    def no_steps(self, sequence: pd.Series[Any]) -> str | None:
        """Return why a sequence has no steps to try sets on, if it has none."""
        if self._trace.capture == "steps":
            return (
                f"{self._trace.path} holds no hidden states: record it with --capture hidden, qkv "
                "or influence"
            )
        return None if len(self._text(sequence).scored_S) else "no step was decoded there"

    def why_not(self, scheme: Scheme, sequence: pd.Series[Any]) -> str | None:
        """Return why a scheme cannot be tried on a sequence, if it cannot."""
        if why := self.no_steps(sequence):
            return why
        text = self._text(sequence)
        others = self._corpus.without(text.prompt_id, text.domain)
        return why_not(scheme, self._trace, text.sequence_id, others)

    def sequence(
        self,
        sequence: pd.Series[Any],
        schemes: Sequence[Scheme],
        sizes: Sequence[int],
        decoder: Decoder,
    ) -> dict[str, dict[str, pa.Table]]:
        """Return, by scheme text, rows on one sequence by table name."""
        text = self._text(sequence)
        tried = evaluate(
            schemes,
            sizes,
            recorded=read_sequence(self._trace, text, self._weights),
            decoder=decoder,
            others=self._corpus.without(text.prompt_id, text.domain),
        )
        shared = {
            "sequence_id": text.sequence_id,
            "domain": sequence["domain"],
            "bucket": length_bucket(int(sequence["num_tokens"])),
        }
        return {
            scheme.text: candidate_tables(
                [one for one in tried if one.asked.scheme == scheme],
                sizes,
                text.scored_S.numpy() + 1,
                decoder.head,
                shared,
            )
            for scheme in schemes
        }

    def facts(self, sequence: pd.Series[Any], decoder: Decoder) -> pa.Table:
        """Return the rows of ``schema.SCORED`` on one sequence."""
        text = self._text(sequence)
        others = self._corpus.without(text.prompt_id, text.domain)
        recorded = read_sequence(self._trace, text, self._weights)
        columns: dict[str, Any] = dict(facts(recorded, decoder, others))
        runs, place_S = recorded.runs()
        classes = self._classes
        columns |= {
            "sequence_id": text.sequence_id,
            "domain": sequence["domain"],
            "bucket": length_bucket(int(sequence["num_tokens"])),
            "class": classes[columns["token_id"]],
            "best_class": classes[columns["best_id"]],
            "is_given": sequence["text_source"] == "given",
            # The number of runs before a step is the place of its own run.
            "regime": regimes([one.entropy_nats for one in runs])[place_S],
        }
        return schema.SCORED.build(len(columns["position"]), columns)

    @cached_property
    def _corpus(self) -> Corpus:
        return read_corpus(self._trace)

    @cached_property
    def _classes(self) -> np.ndarray:
        """Class of each row of the head; rows that no token has are padding."""
        classes = np.full(self._trace.spec.head.num_rows, "padded", dtype=object)
        vocabulary = self._trace.vocabulary()
        classes[vocabulary["token_id"].to_numpy()] = vocabulary["class"].astype(str)
        return classes

    @cached_property
    def decoder(self) -> Decoder:
        """The head and what belongs to it; another model than the trace's is refused."""
        pinned = np.flatnonzero(np.isin(self._classes.astype(str), PINNED))
        return self._weights.decoder(torch.from_numpy(pinned))

    @cached_property
    def _texts(self) -> dict[str, Text]:
        return {one.sequence_id: one for one in self._corpus.texts}

    def _text(self, sequence: pd.Series[Any]) -> Text:
        return self._texts[str(sequence["sequence_id"])]
