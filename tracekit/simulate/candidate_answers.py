"""What is told of all candidate sets of a run together, by table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.simulate.batch_union import batch_unions
from tracekit.simulate.candidate_stats import candidate_stats
from tracekit.simulate.misses import miss_classes, misses
from tracekit.simulate.tries import Tries
from tracekit.simulate.verdicts import verdicts
from tracekit.simulate.vocab import PINNED

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from tracekit.schema import Table
    from tracekit.trace.reader import Trace

ANSWERS = (
    schema.CANDIDATE_STATS,
    schema.MISSES,
    schema.MISS_CLASSES,
    schema.BATCH_UNIONS,
    schema.VERDICTS,
)
"""Tables that are made of those of cells."""


def candidate_answers(
    trace: Trace, rows: Mapping[str, pa.Table], sets: pa.Table, *, seed: int
) -> dict[Table, dict[str, Any]]:
    """Return the columns of ``ANSWERS``; none of them where no set was tried on a known step.

    Parameters
    ----------
    trace
        The trace, for texts and classes of tokens.
    rows
        Rows of ``schema.CANDIDATES``, ``SCORED`` and ``VOCAB_RESULTS``, by table name.
    sets
        Rows of ``schema.CANDIDATE_SETS``.
    seed
        Of resampling and draws.
    """
    candidates, scored, vocab = (
        rows[table.name].to_pandas()
        for table in (schema.CANDIDATES, schema.SCORED, schema.VOCAB_RESULTS)
    )
    if candidates.empty or scored.empty:
        return {table: {} for table in ANSWERS}
    tries = Tries.of(candidates, scored)
    vocabulary = trace.vocabulary()
    tokens = trace.table("tokens", columns=["sequence_id", "position", "token_id"])
    by_sequence = tokens.sort_values("position").groupby("sequence_id", observed=True)["token_id"]
    return {
        schema.CANDIDATE_STATS: candidate_stats(tries, vocab, seed=seed),
        schema.MISSES: misses(
            tries,
            {str(name): ids.to_numpy() for name, ids in by_sequence},
            vocabulary["text"].to_numpy(dtype=object),
        ),
        schema.MISS_CLASSES: miss_classes(tries),
        schema.BATCH_UNIONS: batch_unions(
            sets.to_pandas(),
            candidates,
            vocab,
            num_pinned=int(vocabulary["class"].isin(PINNED).sum()),
            num_rows=trace.spec.head.num_rows,
            seed=seed,
        ),
        schema.VERDICTS: verdicts(tries, vocab, seed=seed),
    }
