"""Candidate sets on one recorded sequence: exact coverage of estimators at all sizes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tracekit import schema
from tracekit.measure.head import Head
from tracekit.measure.tensors import to_torch
from tracekit.simulate.kv import length_bucket
from tracekit.vocab.engine import Fit, evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import pyarrow as pa

    from tracekit.progress import Progress
    from tracekit.trace.reader import Trace
    from tracekit.vocab.estimator import Estimator

PINNED = ("special", "byte")
"""Token classes that are always candidates."""


def load_head(trace: Trace, progress: Progress) -> Head:
    """Return the language-model head: from the trace, else from the model it names.

    Raises
    ------
    ModelError
        If the model under that name is another one than was recorded.
    """
    if trace.has_head:
        return Head.load(trace.weights_path, trace.spec.head)
    progress.say(f"the trace was recorded with --head omit: reading it from {trace.spec.name}.")
    from tracekit.model.head import head_tensors
    from tracekit.model.load import load_model

    loaded = load_model(trace.spec.name)
    loaded.require(trace.spec)
    tensors = head_tensors(loaded.model)
    return Head(tensors["head.weight"], tensors.get("head.bias"), trace.spec.head)


class VocabReplay:
    """What all sequences of a trace share: the head, the pinned ids, token counts by prompt.

    Parameters
    ----------
    trace
        Recorded with final hidden states.
    progress
        Told where the head comes from if the trace does not hold it.
    """

    def __init__(self, trace: Trace, progress: Progress) -> None:
        self._trace = trace
        self._head = load_head(trace, progress)
        vocabulary = trace.vocabulary()
        pinned = vocabulary.loc[vocabulary["class"].isin(PINNED), "token_id"]
        self._pinned = torch.tensor(pinned.to_numpy(dtype=np.int64))
        prompts = trace.sequences.set_index("sequence_id")["prompt_id"]
        tokens = trace.table("tokens", columns=["sequence_id", "token_id"])
        self._fit = Fit.count(
            tokens["token_id"].to_numpy(),
            tokens["sequence_id"].astype(str).map(prompts).to_numpy(),
            num_rows=trace.spec.head.num_rows,
        )

    def sequence(
        self, sequence: pd.Series[Any], estimators: Sequence[Estimator], sizes: Sequence[int]
    ) -> dict[str, pa.Table]:
        """Return, by estimator text, the rows of ``schema.VOCAB_RESULTS`` on one sequence.

        Scored are the generated tokens that a decoding step predicted: the first one comes out of
        the prompt's own pass, which runs the full head. Of given text all tokens are scored that
        count in its window. A sequence without such tokens has no rows, nor has an estimator that
        is fitted on other prompts where there are none.
        """
        sequence_id = str(sequence["sequence_id"])
        steps = self._trace.table(
            "steps",
            sequence_id=sequence_id,
            columns=["sequence_id", "position", "path", "is_scored"],
        )
        tokens = self._trace.table("tokens", sequence_id=sequence_id)
        is_given = sequence["text_source"] == "given"
        counts = steps["is_scored"] & (is_given | (steps["path"].astype(str) == "decode"))
        scored = steps["position"].to_numpy()[counts.to_numpy()] - 1
        fit = self._fit.without(str(sequence["prompt_id"]))
        # Without another prompt there is nothing to count: the order would be that of ids.
        is_alone = not bool(fit.counts_V.any())
        estimators = [one for one in estimators if not (is_alone and one.needs.counts)]
        if not len(scored) or not estimators:
            return {}
        hidden = self._trace.hidden(sequence_id)
        cells = evaluate(
            estimators,
            sizes,
            hidden_TE=to_torch(hidden.data, hidden.dtype),
            token_ids_T=torch.tensor(tokens["token_id"].to_numpy(dtype=np.int64)),
            scored_S=torch.tensor(scored),
            head=self._head,
            pinned_ids=self._pinned,
            fit=fit,
        )
        rows: dict[str, list[dict[str, Any]]] = {}
        for cell in cells:
            rows.setdefault(cell.estimator, []).append(asdict(cell))
        shared = {
            "sequence_id": sequence_id,
            "domain": sequence["domain"],
            "controller": "fixed",
            "bucket": length_bucket(int(sequence["num_tokens"])),
        }
        return {
            text: schema.VOCAB_RESULTS.build(
                len(some), {name: [row[name] for row in some] for name in some[0]} | shared
            )
            for text, some in rows.items()
        }
