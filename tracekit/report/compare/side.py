"""One side of a comparison: what its run was, and its measures by sequence, no column more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.compute as pc

from tracekit import schema
from tracekit.errors import InputError
from tracekit.report.compare.measures import KV, LAYERS, RECORDED, VOCAB, of_question
from tracekit.report.frames import read_frame
from tracekit.schema import ALL, ANY
from tracekit.simulate.folder import read_run
from tracekit.simulate.scheme_name import scheme_name

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.schema import Table

CELL = ("level", "name", "place")
"""Columns that name a cell in every frame: a policy at a level, a scheme at a size, a rule at a layer."""

NO_PLACE = ALL
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
    sequences = {one["sequence_id"]: one for one in run["sequences"]}
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


def _kv(folder: Path) -> pd.DataFrame:
    flags = ["is_idle", "is_clipped", "is_clamped"]
    columns = ["policy", "level", "causal", "target_frac", *flags]
    is_whole = (pc.field("layer") == ALL) & (pc.field("kv_head") == ALL)
    where = is_whole & (pc.field("steps") == ANY)
    frame = _read(folder, schema.KV_RESULTS, KV, columns, where)
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
    scheme = ["estimator", "controller", "fit"]
    frame = _read(folder, schema.VOCAB_RESULTS, VOCAB, [*scheme, "size"]).assign(level="local")
    schemes = frame[scheme].fillna({"fit": "asked"}).itertuples(index=False, name=None)
    names = [scheme_name(*one) for one in schemes]
    where = (pc.field("question") == VOCAB) & pc.field("causal")
    methods = set(read_frame(folder, schema.SUMMARY, ["name"], where)["name"])
    return _shared(
        frame,
        VOCAB,
        name=names,
        place=frame["size"],
        target=frame["size"],
        # Sizes fitted on the steps themselves are not in the summary: no decoder has them.
        is_causal=[name in methods for name in names],
    )


def _layers(folder: Path) -> pd.DataFrame:
    columns = ["rule", "layer", "level", "target_frac", "is_idle"]
    is_whole = pc.field("kv_head") == ALL
    frame = _read(folder, schema.LAYER_RESULTS, LAYERS, columns, is_whole)
    return _shared(
        frame,
        LAYERS,
        name=frame["rule"],
        place=frame["layer"],
        target=frame["target_frac"],
        is_idle=frame["is_idle"].fillna(False).astype(bool),
    )


def _recorded(sequences: dict[str, dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(list(sequences.values()), columns=["sequence_id", *_sources(RECORDED)])
    return _shared(
        frame.assign(level=RECORDED), RECORDED, name=RECORDED, place=NO_PLACE, target=0.0
    )


def _sources(question: str) -> list[str]:
    """Return the columns that the measures of a table are made of, each once."""
    return list(dict.fromkeys(name for one in of_question(question) for name in one.sources))


def _read(
    folder: Path, table: Table, question: str, columns: list[str], where: Any = None
) -> pd.DataFrame:
    """Return some columns of a table, those that its measures are made of, and the sequence."""
    names = ["sequence_id", *columns, *_sources(question)]
    return read_frame(folder, table, names, where)


def _shared(frame: pd.DataFrame, question: str, **columns: Any) -> pd.DataFrame:
    """Return a frame of ``SHARED`` and the measures of a question."""
    usual = {"is_causal": True, "is_idle": False, "is_flagged": False}
    made = frame[["sequence_id", "level"]].assign(**usual | columns)
    for one in of_question(question):
        value, *taken_off = (frame[name].astype("float64") for name in one.sources)
        made[one.name] = value - sum(taken_off)
    return made[[*SHARED, *(one.name for one in of_question(question))]]
