"""Statistics of the scored steps of policies that were run inside the model, by group of steps."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.measure.token_errors import SequenceBootstrap, TokenGaussian
from tracekit.measure.token_rows import NextToken
from tracekit.measure.token_stats import exact_match, token_statistics
from tracekit.simulate.steps import STEP_ENDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from tracekit.measure.token_errors import Errors
    from tracekit.measure.token_stats import Statistic

OF_TEXT = ("ppl_", "ln_ppl_", "nll_")
"""How the names of statistics begin that text made by the model itself cannot answer."""

ENTROPY_ENDS = (0.5, 1.0, 2.0, 4.0)
"""Upper ends (exclusive) of the buckets of a step's entropy under the full cache, in nats."""

NEEDLE = {True: "in the needle", False: "elsewhere"}


def logit_stats(
    logits: pd.DataFrame, kv: pd.DataFrame, *, convention: str, seed: int
) -> dict[str, Any]:
    """Return the columns of ``schema.LOGIT_STATS``.

    Perplexity is told of given text alone: a model is sure of what it has chosen itself.

    Parameters
    ----------
    logits
        Rows of ``schema.LOGITS``.
    kv
        Rows of ``schema.KV_RESULTS`` of all layers and steps together, for kept fractions and
        length buckets.
    convention
        Whose errors are taken: ``tracekit`` resamples sequences, ``llama.cpp`` takes tokens for
        independent.
    seed
        Of the resampling.
    """
    errors: Errors = (
        TokenGaussian() if convention == TokenGaussian.name else SequenceBootstrap(seed)
    )
    whole = kv[kv["level"] == "propagated"]
    kept = whole.groupby("policy", observed=True)["kept_frac"].mean()
    buckets = dict(zip(whole["sequence_id"].astype(str), whole["bucket"].astype(str), strict=True))
    rows: list[dict[str, Any]] = []
    for text, frame in logits.groupby("policy", observed=True, sort=False):
        shared = {
            "policy": str(text),
            "family": str(frame["family"].iloc[0]),
            "kept_frac": float(kept.get(str(text), np.nan)),
            "convention": convention,
        }
        for grouping, group, part in _groups(frame, buckets):
            rows += [
                shared | {"grouping": grouping, "group": group} | one for one in _told(part, errors)
            ]
    names = [column.name for column in schema.LOGIT_STATS.columns]
    return {name: [row[name] for row in rows] for name in names}


def _groups(
    frame: pd.DataFrame, buckets: dict[str, str]
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield the steps of each group: its kind and its name."""
    yield "all", schema.ANY, frame
    kinds: dict[str, Any] = {
        "domain": frame["domain"].astype(str),
        "bucket": frame["sequence_id"].astype(str).map(buckets),
        "distance": _named(frame["distance"].to_numpy() - 1, STEP_ENDS, _step_names()),
        "entropy": _named(frame["entropy_full_nats"].to_numpy(), ENTROPY_ENDS, entropy_names()),
    }
    if frame["is_needle"].any():
        kinds["needle"] = frame["is_needle"].map(NEEDLE)
    for kind, names in kinds.items():
        for name, part in frame.groupby(np.asarray(names, dtype=object), sort=True, dropna=True):
            yield kind, str(name), part


def entropy_names() -> tuple[str, ...]:
    """Return the names of the buckets that ``ENTROPY_ENDS`` end, and of the last."""
    pairs = zip((0, *ENTROPY_ENDS), ENTROPY_ENDS, strict=False)
    return (*(f"{low:g}-{high:g} nats" for low, high in pairs), f">= {ENTROPY_ENDS[-1]:g} nats")


def _step_names() -> tuple[str, ...]:
    """Return the names of step buckets, whose ends are inclusive."""
    pairs = zip((0, *STEP_ENDS), STEP_ENDS, strict=False)
    return (*(f"{low + 1}-{high}" for low, high in pairs), f">{STEP_ENDS[-1]}")


def _named(values: np.ndarray, ends: Sequence[float], names: Sequence[str]) -> np.ndarray:
    """Return the name of the bucket of each value, None for NaN."""
    found = np.array(names, dtype=object)[np.digitize(np.nan_to_num(values), ends)]
    found[np.isnan(values.astype(np.float64))] = None
    named: np.ndarray = found
    return named


def _told(frame: pd.DataFrame, errors: Errors) -> Iterator[dict[str, Any]]:
    """Yield the statistics of some steps, in order."""
    every = token_statistics(_sequences(frame), errors)
    given_frame = frame[frame["is_given"].to_numpy(dtype=bool)]
    given = token_statistics(_sequences(given_frame), errors)
    for one, of_given in zip(every, given, strict=True):
        of_text = one.name.startswith(OF_TEXT)
        yield _row(of_given if of_text else one, given_frame if of_text else frame)
    marks = [part["is_answer"].to_numpy(dtype=bool) for part in _parts(frame)]
    asked = frame[frame["is_answer"].to_numpy(dtype=bool)]
    for one in exact_match(_sequences(frame), marks, errors):
        yield _row(one, asked)


def _row(one: Statistic, frame: pd.DataFrame) -> dict[str, Any]:
    row = asdict(one)
    row["statistic"] = row.pop("name")
    return row | {"n": frame["sequence_id"].nunique(), "num_steps": len(frame)}


def _parts(frame: pd.DataFrame) -> list[pd.DataFrame]:
    return [part for _, part in frame.groupby("sequence_id", observed=True, sort=True)]


def _sequences(frame: pd.DataFrame) -> list[NextToken]:
    """Return the steps of each sequence."""
    names = [field.name for field in fields(NextToken)]
    return [NextToken(**{name: part[name].to_numpy() for name in names}) for part in _parts(frame)]
