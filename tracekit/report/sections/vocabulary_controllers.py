"""What a controller of the size gains over a fixed size of the same mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.measure.stats import Interval, paired_difference
from tracekit.report.blocks import Text
from tracekit.report.formats import count, percent
from tracekit.report.sections.vocabulary_named import scheme_text, short_names
from tracekit.report.tables import INTERVAL, Column, build, text_column
from tracekit.schema import VOCAB_RESULTS

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results

_FIXED = "fixed"
_NAMES = ("others", "own", "shuffled")
_VALUE, _STEPS = "hit_argmax", "num_scored"


def controllers(results: Results) -> list[Block]:
    """Return what each controller gains at each size, and in words; [] where none was tried."""
    vocab = results.table(VOCAB_RESULTS)
    tried = vocab.loc[vocab["fit"] == "own", ["estimator", "controller"]].drop_duplicates()
    rows, short = [], short_names(results)
    for estimator, controller in tried.itertuples(index=False, name=None):
        of_estimator = vocab[vocab["estimator"] == estimator]
        name = short.get(text := scheme_text(estimator, controller), text)
        rows += _gains(of_estimator, controller, name, results.run["seed"])
    if not rows:
        return []
    columns = (
        text_column("scheme"),
        Column("mean size", count),
        Column("fixed size", percent),
        Column("fitted on others", percent),
        Column("same mean size", percent),
        Column("gain (points)", _points),
        INTERVAL,
        Column("of it timing (points)", _points),
        INTERVAL,
        Column("n", count),
    )
    caption = (
        "Most likely tokens covered by a size that a controller sets at each step, against the fixed "
        "size of the same mean on the same sequences, all steps alike, level local, seed "
        f"{results.run['seed']}. Fitted on others: "
        "sizes by what other prompts needed. Timing: against the same sizes at other steps. The sizes of the "
        "same mean are hindsight: no decoder has them."
    )
    cells = [row[:-1] for row in rows]
    return [
        Text(text=_said([row[-1] for row in rows])),
        build("table-controllers", caption, columns, cells),
    ]


def _gains(vocab: pd.DataFrame, controller: str, name: str, seed: int) -> list[list[Any]]:
    """Return a row a size; the last entry is the gain as an interval."""
    check = controller.partition("@")[2]
    fixed = vocab[vocab["controller"] == (f"{_FIXED}@{check}" if check else _FIXED)]
    tried = vocab[vocab["controller"] == controller]
    rows = []
    for size in sorted(set(tried["size"])):
        parts = {one: _by_sequence(tried[tried["fit"] == one], size) for one in _NAMES}
        base, own = _by_sequence(fixed, size), parts["own"]
        gain, timing = _change(own, base, seed), _change(own, parts["shuffled"], seed)
        means = [_mean(part) for part in (base, parts["others"], own)]
        told = [gain.mean, _interval(gain), timing.mean, _interval(timing), gain.n]
        rows.append([name, size, *means, *told, gain])
    return rows


def _by_sequence(rows: pd.DataFrame, size: int) -> pd.DataFrame:
    """Return share and steps by sequence, the share exact: tables hold it in float32."""
    part = rows[rows["size"] == size].set_index("sequence_id")[[_VALUE, _STEPS]].astype(float)
    hits = (part[_VALUE] * part[_STEPS]).round()
    return part.assign(**{_VALUE: hits / part[_STEPS]})


def _change(own: pd.DataFrame, other: pd.DataFrame, seed: int) -> Interval:
    both = own.join(other[_VALUE].rename("base"), how="inner")
    return paired_difference(both[_VALUE], both["base"], seed=seed, weights=both[_STEPS])


def _mean(part: pd.DataFrame) -> float:
    total = part[_STEPS].sum()
    return float((part[_VALUE] * part[_STEPS]).sum() / total) if total else float("nan")


def _said(gains: list[Interval]) -> str:
    """Return how often a controller is better or worse than chance allows."""
    known = [(one.low, one.high) for one in gains if one.low is not None and one.high is not None]
    better = sum(low > 0 for low, _ in known)
    worse = sum(high < 0 for _, high in known)
    if not known:
        return "Too few sequences to say whether a controller of the size gains anything."
    return (
        f"A size set at each step beats the fixed size of the same mean at {better} of {len(known)} "
        f"sizes and loses at {worse}, by intervals that leave 0 out; elsewhere no difference shows."
    )


def _points(gain: float) -> str:
    return f"{100 * gain:+.2f}"


def _interval(gain: Interval) -> str:
    if gain.low is None or gain.high is None:
        return "n/a"
    return f"{_points(gain.low)} to\u00a0{_points(gain.high)}"
