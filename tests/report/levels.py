"""Results at several levels, made of chosen numbers a sequence and summarised as in a real run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq

from tests.report.fake import make_results, write_table
from tracekit.report.load import KEY_MEASURES, Results, load_results
from tracekit.schema import ALL, ANY, KV_RESULTS, SUMMARY, VOCAB_RESULTS
from tracekit.simulate.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tracekit.schema import Table


@dataclass(frozen=True)
class Cell:
    """A policy at one fraction: its loss on each sequence, by level, and what else a row says."""

    family: str
    kept: float
    losses: Mapping[str, Sequence[float]]
    target: float | None = None
    more: Mapping[str, Any] | None = None
    suffix: str = ""

    def rows(self, sequences: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        target = self.kept if self.target is None else self.target
        common = {
            "policy": f"{self.family}:kept={target:g},sinks=0,at=prompt{self.suffix}",
            "family": self.family,
            "causal": True,
            "selects": False,
            "evict_at": "at=prompt",
            "query_aware": True,
            "layer": ALL,
            "kv_head": ALL,
            "steps": ANY,
            "bucket": "< 256",
            "target_frac": target,
            "kept_frac": self.kept,
            "kv_bytes": 1e6 * self.kept,
            "full_kv_bytes": 1e6,
            "num_evicted": 9,
            "is_idle": False,
            "is_clipped": False,
            "is_clamped": False,
            "num_scored": 63,
        }
        return [
            common
            | {"sequence_id": one["sequence_id"], "domain": one["domain"], "level": level}
            | {KEY_MEASURES[level]: value}
            | dict(self.more or {})
            for level, values in self.losses.items()
            for one, value in zip(sequences, values, strict=False)
        ]


def same(value: float, n: int) -> list[float]:
    """Return nearly the same loss on each of n sequences."""
    return [value * (1 + 0.01 * number) for number in range(n)]


def make(
    folder: Path,
    cells: Sequence[Cell],
    *,
    num_sequences: int = 12,
    names: Sequence[str] = (),
    domains: Sequence[str] = (),
    tables: Mapping[Table, Sequence[Mapping[str, Any]]] | None = None,
    vocab: bool = False,
) -> Results:
    """Write results of these cells and tables, and load them.

    Parameters
    ----------
    folder
        New folder.
    cells
        Policies; without any there are no KV results.
    num_sequences
        Sequences of the run; a cell may have values of fewer.
    names, domains
        Of the sequences, where they matter.
    tables
        Rows of other tables.
    vocab
        Whether the estimators of ``fake`` are there too.
    """
    questions = ("vocab",) if vocab else ()
    make_results(folder, num_sequences=num_sequences, questions=questions)
    sequences = [
        {
            "sequence_id": names[number] if names else f"p{number}#0",
            "domain": domains[number] if domains else ("story", "code")[number % 2],
        }
        for number in range(num_sequences)
    ]
    rows = pd.DataFrame([row for cell in cells for row in cell.rows(sequences)])
    found = [pq.read_table(folder / "summary.parquet").to_pandas()]
    if len(rows):
        write_table(folder, KV_RESULTS, rows)
        whole = KV_RESULTS.build(len(rows), {str(n): rows[n].to_list() for n in rows.columns})
        none = VOCAB_RESULTS.schema.empty_table().to_pandas()
        found.append(pd.DataFrame(summarise(whole.to_pandas(), none, seed=0)))
    write_table(folder, SUMMARY, pd.concat([one for one in found if len(one)] or found[:1]))
    for table, some in (tables or {}).items():
        write_table(folder, table, pd.DataFrame(list(some)))
    return load_results(folder)
