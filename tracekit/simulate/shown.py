"""The tokens of a few sequences for the report, since the trace may move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from tracekit.trace.reader import Trace

SHOWN_SEQUENCES = 6
SHOWN_CANDIDATES = 5
SPECIAL = ("\u27e6", "\u27e7")
"""Stand around the text of a special token."""


def choose_sequences(trace: Trace, count: int = SHOWN_SEQUENCES) -> list[str]:
    """Return the first sequence of each domain, at most ``count``, in the order of recording."""
    firsts = trace.sequences.drop_duplicates("domain")["sequence_id"]
    return [str(name) for name in firsts.head(count)]


def token_texts(vocabulary: pd.DataFrame) -> np.ndarray:
    """Return the readable text of each row of the logits; special tokens in double brackets.

    Ordinary tokens can spell the same words as a special one, and the model reads them otherwise.

    Parameters
    ----------
    vocabulary
        Rows of ``schema.VOCAB``.
    """
    texts, is_special = vocabulary["text"], vocabulary["class"] == "special"
    marked: np.ndarray = texts.where(~is_special, SPECIAL[0] + texts + SPECIAL[1]).to_numpy(object)
    return marked


def shown_tokens(trace: Trace, sequence_id: str, texts: np.ndarray) -> pa.Table:
    """Return the rows of ``schema.SHOWN`` of one sequence.

    Parameters
    ----------
    trace
        The trace.
    sequence_id
        Its sequence.
    texts
        Readable text by token id (``token_texts``).
    """
    tokens = trace.table("tokens", sequence_id=sequence_id)
    steps = trace.table("steps", sequence_id=sequence_id)
    # Position 0 is predicted by nothing: its statistics are null.
    frame = tokens.merge(steps.drop(columns="sequence_id"), on="position", how="left")
    columns: dict[str, Any] = {
        "sequence_id": sequence_id,
        "position": frame["position"],
        "text": texts[frame["token_id"].to_numpy()],
        "is_generated": frame["is_generated"],
        "role": frame["role"].astype(object).where(frame["role"].notna(), None),
        "entropy_nats": frame["entropy_nats"],
        "surprisal_nats": frame["surprisal_nats"],
        "rank": frame["rank"],
        "top_texts": [_some(ids, lambda ids: texts[ids].tolist()) for ids in frame["top_ids"]],
        "top_probs": [
            _some(logs, lambda logs: np.exp(logs).tolist()) for logs in frame["top_logprobs"]
        ],
    }
    return schema.SHOWN.build(len(frame), columns)


def _some(values: Any, read: Any) -> list[Any] | None:
    """Return the first few values, read; None where there is no list."""
    return read(np.asarray(values)[:SHOWN_CANDIDATES]) if isinstance(values, np.ndarray) else None
