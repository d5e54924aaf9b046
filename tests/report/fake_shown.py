"""What a report shows token by token, added to a folder of fake results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.report.fake import ESTIMATORS, KEPT, POLICIES, write_table
from tracekit.schema import CANDIDATES, HELD, SHOWN

if TYPE_CHECKING:
    from pathlib import Path

TRIED_FROM = 150
"""First generated token of the fake."""


def add_shown(folder: Path, *, seed: int = 0, num_tokens: int | None = None) -> Path:
    """Add what is held and what was a candidate; ``num_tokens``: of one sequence made that long."""
    rng = np.random.default_rng(seed)
    shown = pq.read_table(folder / "shown.parquet").to_pandas()
    if num_tokens is not None:
        shown = _stretched(shown, num_tokens)
        write_table(folder, SHOWN, shown)
    held: list[dict[str, Any]] = []
    candidates: list[dict[str, Any]] = []
    for name, rows in shown.groupby("sequence_id", observed=True, sort=False):
        held += _held(rng, str(name), len(rows))
        candidates += _candidates(rng, str(name), len(rows))
    write_table(folder, HELD, pd.DataFrame(held))
    write_table(folder, CANDIDATES, pd.DataFrame(candidates))
    return folder


BAD_NAME = "=1+1 <!-- ]]> </script><script>alert(3)</script>'\"><img src=x onerror=alert(4)> {0}"
"""A name that ends every context a page has; ``{0}``: what it names."""

_NAMED = {
    "family": "snapkv",
    "estimator": "lowrank",
    "domain": "story",
    "sequence_id": "story-00#0",
}


def rename_badly(folder: Path) -> Path:
    """Give a policy, an estimator, a domain, a sequence, the model and a failure a bad name."""
    bad = {old: BAD_NAME.format(what) for what, old in _NAMED.items()}
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        for place, column in enumerate(table.schema):
            if column.name in {*_NAMED, "name"}:
                texts = [bad.get(one, one) for one in table[column.name].to_pylist()]
                made = pa.array(texts, pa.string()).cast(column.type)
                table = table.set_column(place, column, made)
        pq.write_table(table, path)
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for one in run["sequences"]:
        one |= {name: bad.get(one[name], one[name]) for name in ("domain", "sequence_id")}
    run["trace"]["spec"]["name"] = BAD_NAME.format("model")
    run["failed"] = [{"cell": BAD_NAME.format("cell"), "why": BAD_NAME.format("why")}]
    run["skipped"] = [{"what": BAD_NAME, "sequence_id": None, "why": BAD_NAME.format("why")}]
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def _stretched(shown: pd.DataFrame, num_tokens: int) -> pd.DataFrame:
    """Return the first sequence over and over."""
    first = shown[shown["sequence_id"] == shown["sequence_id"].iloc[0]]
    rows: pd.DataFrame = first.iloc[np.arange(num_tokens) % len(first)].reset_index(drop=True)
    rows["position"] = np.arange(num_tokens)
    return rows


def _held(rng: np.random.Generator, sequence_id: str, num_tokens: int) -> list[dict[str, Any]]:
    """Return rows of all policies; in a window of half the length the first rows are gone."""
    rows = []
    for family in POLICIES:
        for target in KEPT:
            heads = rng.binomial(90, target, num_tokens - 1) / 90
            heads[TRIED_FROM:] = 1
            gone = 20 if family == "streaming" else 0
            rows.append(
                {
                    "sequence_id": sequence_id,
                    "policy": f"{family}:kept={target:g}",
                    "family": family,
                    "point": TRIED_FROM,
                    "held_frac": [None] * gone + heads[gone:].tolist(),
                }
            )
    return rows


def _candidates(
    rng: np.random.Generator, sequence_id: str, num_tokens: int
) -> list[dict[str, Any]]:
    return [
        {
            "sequence_id": sequence_id,
            "position": position,
            "estimator": estimator,
            "controller": "fixed",
            "fit": "asked",
            "size": size,
            "hit_argmax": bool(rng.random() > misses),
        }
        for estimator, (misses, _) in ESTIMATORS.items()
        for size in (256, 1024)
        for position in range(TRIED_FROM, num_tokens)
    ]
