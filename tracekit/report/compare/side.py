"""One side of a comparison: what its run was, and its measures by sequence, no column more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from tracekit import schema
from tracekit.errors import InputError
from tracekit.report.compare.measures import KV, LAYERS, RECORDED, VOCAB, of_question
from tracekit.report.load import plain
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.schema import Table

CELL = ("level", "name", "place")
"""Columns that name a cell in every frame: a policy at a level, a scheme at a size, a rule at a layer."""

NO_PLACE = schema.ALL
"""Place of a cell that has neither size nor layer."""

SHARED = (*CELL, "sequence_id", "target", "is_causal", "is_idle", "is_flagged")
"""Columns that every frame has beside its measures."""

_WHOLE = 1.0  # What keeps everything evicts nothing by intent: it is measured all the same.


@dataclass(frozen=True, eq=False)
class Side:
    """Results of one simulation, as far as they can be compared.

    Parameters
    ----------
    folder
        Where they are.
    run
        ``run.json``.
    sequences
        What ``run.json`` says of each sequence, by its id.
    frames
        By question: a row a cell and sequence, columns ``SHARED`` and the measures, null where one
        does not apply.
    """

    folder: Path
    run: dict[str, Any]
    sequences: dict[str, dict[str, Any]]
    frames: dict[str, pd.DataFrame]


def read_side(folder: Path) -> Side:
    """Return one side of a comparison.

    Raises
    ------
    InputError
        If the folder is no results folder, of another version, or damaged.
    """
    run = read_run(folder)
    sequences = _sequences(folder, run)
    frames = {
        KV: _kv(folder),
        VOCAB: _vocab(folder),
        LAYERS: _layers(folder),
        RECORDED: _recorded(sequences),
    }
    for question, frame in frames.items():
        if frame.duplicated([*CELL, "sequence_id"]).any():
            msg = f"{folder} has rows of {question} twice: it is damaged; simulate again."
            raise InputError(msg)
    return Side(folder, run, sequences, frames)


def _sequences(folder: Path, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    needed = [
        "sequence_id",
        "prompt_id",
        "domain",
        "num_tokens",
        "prompt_end",
        "context_end",
        "text_source",
    ]
    try:
        return {
            one["sequence_id"]: one | {name: one[name] for name in needed}
            for one in run["sequences"]
        }
    except (KeyError, TypeError) as error:
        msg = f"{folder / 'run.json'} does not say {error} of each sequence; simulate again."
        raise InputError(msg) from error


def read_columns(folder: Path, table: Table, columns: list[str]) -> pd.DataFrame:
    """Return some columns of a table, of all layers and heads together where it has such rows.

    No rows where there is no file.

    Raises
    ------
    InputError
        If the file is damaged or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = folder / f"{table.name}.parquet"
    if not path.exists():
        return plain(table.schema.empty_table().select(columns))
    chosen = pc.field("kv_head") == schema.ALL if "kv_head" in table.schema.names else None
    if table is schema.KV_RESULTS:
        chosen = chosen & (pc.field("layer") == schema.ALL)
    try:
        return plain(pq.read_table(path, columns=columns, filters=chosen).select(columns))
    except (OSError, KeyError, pa.ArrowException) as error:
        msg = f"{path} is damaged ({' '.join(str(error).split())}): simulate again."
        raise InputError(msg) from error


def _kv(folder: Path) -> pd.DataFrame:
    flags = ["is_idle", "is_clipped", "is_clamped"]
    columns = ["sequence_id", "policy", "level", "causal", "steps", "target_frac", *flags]
    frame = read_columns(folder, schema.KV_RESULTS, [*columns, *_sources(KV)])
    frame = frame[frame["steps"] == schema.ANY].reset_index(drop=True)
    is_set = {flag: frame[flag].fillna(False).astype(bool) for flag in flags}
    return _shared(
        frame,
        KV,
        name=frame["policy"],
        place=NO_PLACE,
        target=frame["target_frac"],
        is_causal=frame["causal"].fillna(True).astype(bool),
        is_idle=is_set["is_idle"] & ~(frame["target_frac"] >= _WHOLE),
        is_flagged=is_set["is_clipped"] | is_set["is_clamped"],
    )


def _vocab(folder: Path) -> pd.DataFrame:
    columns = ["sequence_id", "estimator", "controller", "fit", "size"]
    frame = read_columns(folder, schema.VOCAB_RESULTS, [*columns, *_sources(VOCAB)])
    frame = frame.assign(level="local")
    summary = read_columns(folder, schema.SUMMARY, ["question", "name", "causal"])
    methods = set(summary.loc[summary["question"].eq(VOCAB) & summary["causal"].eq(True), "name"])
    names = [
        scheme_text(*one)
        for one in zip(
            frame["estimator"], frame["controller"], frame["fit"].fillna("asked"), strict=True
        )
    ]
    return _shared(
        frame,
        VOCAB,
        name=names,
        place=frame["size"],
        target=frame["size"],
        # Sizes fitted on the steps themselves are not in the summary: no decoder has them.
        is_causal=[name in methods for name in names],
    )


def scheme_text(estimator: str, controller: str, fit: str) -> str:
    """Return what a scheme is called in every table: as ``simulate.summary.scheme_name`` says.

    That one cannot be asked here: it stands beside engines that need torch.
    """
    control = controller.removeprefix("fixed").removeprefix("@")
    fitted = "" if fit in ("asked", "others") else f" fit={fit}"
    return f"{estimator}@{control}{fitted}" if control else estimator


def _layers(folder: Path) -> pd.DataFrame:
    columns = ["sequence_id", "rule", "layer", "level", "target_frac", "is_idle"]
    frame = read_columns(folder, schema.LAYER_RESULTS, [*columns, *_sources(LAYERS)])
    return _shared(
        frame,
        LAYERS,
        name=frame["rule"],
        place=frame["layer"],
        target=frame["target_frac"],
        is_idle=frame["is_idle"].fillna(False).astype(bool),
    )


def _recorded(sequences: dict[str, dict[str, Any]]) -> pd.DataFrame:
    columns = ["sequence_id", *_sources(RECORDED)]
    rows = [{name: one.get(name) for name in columns} for one in sequences.values()]
    frame = pd.DataFrame(rows, columns=columns).assign(level=RECORDED)
    return _shared(frame, RECORDED, name=RECORDED, place=NO_PLACE, target=0.0)


def _sources(question: str) -> list[str]:
    """Return the columns that the measures of a table are made of, each once."""
    of = of_question(question)
    return list(dict.fromkeys(name for one in of for name in (one.column, one.minus) if name))


def _shared(frame: pd.DataFrame, question: str, **columns: Any) -> pd.DataFrame:
    """Return a frame of ``SHARED`` and the measures of a question."""
    usual = {"is_causal": True, "is_idle": False, "is_flagged": False}
    made = frame[["sequence_id", "level"]].assign(**usual | columns)
    for one in of_question(question):
        values = frame[one.column].astype("float64")
        made[one.name] = values - frame[one.minus].astype("float64") if one.minus else values
    return made[[*SHARED, *(one.name for one in of_question(question))]]
