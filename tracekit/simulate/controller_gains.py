"""What a controller of set sizes gains over sizes that know less. Needs no torch: reports ask it too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.measure.stats import paired_difference
from tracekit.schema import OTHERS, OWN, SHUFFLED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Row = Mapping[Any, Any]

FIXED = "fixed"
"""The baseline whose size is the one asked at every step, and the controller that sets it."""

FITS = (FIXED, OTHERS, OWN, SHUFFLED)
BASELINES = (FIXED, SHUFFLED)
"""What sizes are told of, and which of them ``own`` is held against."""

MEASURES = ("hit_argmax", "neg_log_mass_nats", "set_size_mean")
_SHARES = ("hit_argmax",)  # Measures that count steps.


def fixed_controller(controller: str) -> str:
    """Return the controller that asks for the same size at every step, with the same check."""
    _, at, check = controller.partition("@")
    return f"{FIXED}{at}{check}"


def gains(
    tried: Sequence[Row], fixed: Sequence[Row], *, seed: int, measures: Sequence[str] = MEASURES
) -> list[dict[str, Any]]:
    """Return what a controller gains over sets whose sizes know less.

    Parameters
    ----------
    tried
        Rows of ``schema.VOCAB_RESULTS`` of a scheme whose sizes a controller sets.
    fixed
        Those of the same estimator and check with the sizes asked at every step.
    seed
        Of the resampling of sequences.
    measures
        Columns that are compared; null is None.

    Returns
    -------
    list of dict
        One a size and measure: means over all steps alike of ``fixed`` and of each fit; of each
        baseline, ``own`` minus it on the same sequences with its interval and their number.
        ``num_sequences_`` says of each mean how many sequences are in it.
    """
    by: dict[tuple[int, str], dict[str, Row]] = {}
    for fit, rows in ((FIXED, fixed), *((row["fit"], [row]) for row in tried)):
        for row in rows:
            by.setdefault((row["size"], fit), {})[row["sequence_id"]] = row
    found = []
    for size in sorted({row["size"] for row in tried}):
        parts = {fit: by.get((size, fit), {}) for fit in FITS}
        for measure in measures:
            told: dict[str, Any] = {}
            for fit, part in parts.items():
                told |= _mean(part.values(), measure, fit)
            for baseline in BASELINES:
                told |= _change(parts[OWN], parts[baseline], measure, baseline, seed)
            found.append({"measure": measure, "size": size} | told)
    return found


def _mean(rows: Iterable[Row], measure: str, fit: str) -> dict[str, Any]:
    """Return the mean over all steps alike, None of none, and of how many sequences it is."""
    pairs = [(_value(row, measure), row["num_scored"]) for row in rows if row[measure] is not None]
    total = sum(num for _, num in pairs)
    mean = sum(value * num for value, num in pairs) / total if pairs else None
    return {fit: mean, f"num_sequences_{fit}": len(pairs)}


def _value(row: Row, measure: str) -> Any:
    """Return a mean of a sequence; a share of its steps exactly, since rows hold it in float32."""
    value, num = row[measure], row["num_scored"]
    return value if value is None or measure not in _SHARES else round(value * num) / num


def _change(
    own: Mapping[str, Row], other: Mapping[str, Row], measure: str, baseline: str, seed: int
) -> dict[str, Any]:
    """Return what own rows, by sequence, have more than those of a baseline."""
    names = [name for name in own if name in other]
    with np.errstate(invalid="ignore"):  # sets without any mass: infinity on either side
        found = paired_difference(
            [_value(own[name], measure) for name in names],
            [_value(other[name], measure) for name in names],
            seed=seed,
            weights=[own[name]["num_scored"] for name in names],
        )
    ends = {f"{end}_{baseline}": getattr(found, end) for end in ("low", "high", "n")}
    return {f"own_minus_{baseline}": found.mean} | ends
