"""The shape of attention: how many keys it is spread over, how far it reaches, what lasts (B11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema
from tracekit.measure.stats import bootstrap_mean, paired_difference
from tracekit.report.blocks import Absent, Items, Section, Text
from tracekit.report.figures.distance_mass import attention_by_distance, layer_rows, layer_thirds
from tracekit.report.figures.effective_keys import effective_keys_by_layer
from tracekit.report.formats import number, percent
from tracekit.report.tables import HtmlTable, build, text_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pandas as pd

    from tracekit.measure.stats import Interval
    from tracekit.report.blocks import Block
    from tracekit.report.load import Results
    from tracekit.report.options import Options

SINK_MASS = 0.3
"""Mean mass on the first key from which a head is said to have a sink there (Gu et al. 2024,
arXiv 2410.10781, section 3: they take query heads and all rows, here it is KV heads and scored
rows)."""

_MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("keys seen by a row", "seen_keys", number),
    ("effective keys, 1 / sum a\u00b2", "effective_keys", number),
    ("entropy over that of an even spread", "entropy_frac", percent),
    ("keys with 95\u00a0% of a row's mass, of the keys seen", "keys_95_frac", percent),
    ("mass on the first key", "first_1_mass", percent),
    ("mass on the newest 32 keys", "newest_32_mass", percent),
    ("half-life of top keys, where there is one (rows)", "half_life_rows", number),
    ("layers without one: more than half stay", "is_lasting", percent),
    ("top keys shared inside a group of query heads", "group_jaccard", percent),
    ("top keys shared between KV heads", "kv_head_jaccard", percent),
    ("top keys shared with the layer above", "next_layer_jaccard", percent),
)
"""Rows of the table by layer thirds: what it is, its column, how it is written."""


def section(results: Results, options: Options) -> Section | Absent:
    """Return what the attention statistics say; ``Absent`` without any."""
    del options
    rows = layer_rows(results)
    if rows.empty:
        return Absent(
            what="The shape of attention by layer", command=_command(results, "--attention")
        )
    thirds = layer_thirds(rows["layer"])
    seed = results.run["seed"]
    findings = (
        ("Breadth", _breadth(rows, seed)),
        ("Claim: no one kept fraction fits all layers", _by_layer(rows, seed)),
        ("Claim: shallow layers are more spread out", _shallow(rows, thirds, seed)),
        ("First key", _sinks(results, rows, seed)),
        ("Sink logits", _sink_logits(rows, seed)),
    )
    blocks: list[Block] = [
        Text(
            text=(
                "How attention is spread says how much of the cache can go, before any policy is "
                "tried. All numbers are of level local, over the scored rows, on the full cache; "
                f"brackets hold 95\u00a0% bootstrap intervals over sequences (seed {seed})."
            ),
            look="note",
        ),
        Items(items=tuple((what, said) for what, said in findings if said)),
        attention_by_distance(results)
        or Absent(what="Attention mass by distance", command=_command(results, "--attention")),
        effective_keys_by_layer(results),
        _by_thirds(rows, thirds, seed),
    ]
    return Section(
        name="attention", title="The shape of attention", short="Attention", blocks=tuple(blocks)
    )


def _command(results: Results, flag: str) -> str:
    """Return how to get it: from the trace, or from a new one where the trace holds too little."""
    again = f"tracekit simulate TRACE -o NEW_RESULTS {flag}"
    if results.run["trace"]["capture"] in ("steps", "hidden"):
        model = results.spec.name
        return f"tracekit record --model {model} --prompts core --capture qkv -o TRACE && {again}"
    return again


def _told(found: Interval, write: Callable[[float], str]) -> str:
    """Return a mean with its interval and n: ``13.4 [12.9 to 14.1], n = 16``."""
    return f"{_brief(found, write)}, n\u00a0=\u00a0{found.n}"


def _brief(found: Interval, write: Callable[[float], str]) -> str:
    if found.mean is None:
        return write(float("nan"))
    if found.low is None or found.high is None:
        return f"{write(found.mean)} [no interval below 3 sequences]"
    return f"{write(found.mean)} [{write(found.low)}\u00a0to\u00a0{write(found.high)}]"


def _mean(rows: pd.DataFrame, column: str, seed: int) -> Interval:
    """Return the mean over sequences of their means over the layers given."""
    return bootstrap_mean(rows.groupby("sequence_id")[column].mean().to_numpy(), seed=seed)


def _layer_means(rows: pd.DataFrame, column: str) -> dict[int, float]:
    """Return the mean over sequences of each layer that has any."""
    means = rows.groupby("layer")[column].mean().dropna()
    return dict(zip(means.index.to_list(), means.to_list(), strict=True))


def _breadth(rows: pd.DataFrame, seed: int) -> str:
    seen, effective = (_mean(rows, one, seed) for one in ("seen_keys", "effective_keys"))
    text = (
        f"a row sees {_brief(seen, number)} keys and attends in effect to "
        f"{_told(effective, number)} (1 / sum a\u00b2)."
    )
    needed = _mean(rows, "keys_95_frac", seed)
    if needed.mean is None:
        return text
    return text + (
        f" 95\u00a0% of its mass lies on {_brief(needed, percent)} of the keys, chosen anew for each "
        "row; a set that is chosen once must be larger, because rows differ."
    )


def _by_layer(rows: pd.DataFrame, seed: int) -> str:
    """Return how far layers differ in what they need; '' where it was not measured."""
    means = _layer_means(rows, "needed_frac_95")
    if len(means) < 2:
        return ""
    ends = [pick(means, key=lambda layer: means[layer]) for pick in (min, max)]
    found = [_mean(rows[rows["layer"] == layer], "needed_frac_95", seed) for layer in ends]
    low, high = (
        f"{_told(one, percent)}, in layer {layer}" for one, layer in zip(found, ends, strict=True)
    )
    apart = found[0].high is not None and found[1].low is not None and found[0].high < found[1].low
    verdict = "holds here" if apart else "not decided: the intervals of the extremes overlap"
    rows_share = percent(float(rows["row_quantile"].dropna().iloc[0]))
    return (
        f"{verdict}. A set chosen once that keeps 95\u00a0% of the mass of {rows_share} of the rows "
        "needs between "
        f"{low}, and {high}, of the keys seen at the eviction point (lowest and highest of "
        f"{len(means)} layers). The kept fractions recommended by layer follow from this."
    )


def _shallow(rows: pd.DataFrame, thirds: dict[str, list[int]], seed: int) -> str:
    """Return whether the first third has more effective keys than the last."""
    if len(thirds) < 2:
        return ""
    by_sequence = {
        name: rows[rows["layer"].isin(part)].groupby("sequence_id")["effective_keys"].mean()
        for name, part in thirds.items()
    }
    shallow, *_, deep = by_sequence
    widest = max(by_sequence, key=lambda name: by_sequence[name].mean())
    values, baseline = by_sequence[shallow].align(by_sequence[deep])
    found = paired_difference(values.to_numpy(), baseline.to_numpy(), seed=seed)
    if found.low is None or found.high is None:
        verdict = "not decided: an interval needs 3 sequences"
    elif found.low > 0:
        verdict = "holds here"
    else:
        verdict = "refuted here" if found.high < 0 else "not decided here"
    means = ", ".join(f"{number(one.mean())} ({name})" for name, one in by_sequence.items())
    return (
        f"{verdict}. Effective keys: {means}; shallow less deep {_told(found, number)}, paired by "
        f"sequence. Widest: {widest}."
    )


def _sinks(results: Results, rows: pd.DataFrame, seed: int) -> str:
    """Return which layers put how much on the first key; '' where it was not measured."""
    means = _layer_means(rows, "first_1_mass")
    if not means:
        return ""
    least, most = (pick(means, key=lambda layer: means[layer]) for pick in (min, max))
    heads = results.table(schema.ATTENTION_RESULTS)
    heads = heads[heads["kv_head"] != schema.ALL]
    mass = heads.groupby(["layer", "kv_head"])["first_1_mass"].mean()
    share = (mass > SINK_MASS).groupby(level="layer").mean()
    named = _ranges([int(layer) for layer in share.index[share > 0.5]])
    return (
        f"takes {_told(_mean(rows, 'first_1_mass', seed), percent)} of the mass; most in layer "
        f"{most} ({percent(means[most])}), least in layer {least} ({percent(means[least])}). "
        f"{int((mass > SINK_MASS).sum())} of {len(mass)} KV heads are sinks (more than "
        f"{percent(SINK_MASS)} on it); layers in which most heads are: {named or 'none'}."
    )


def _sink_logits(rows: pd.DataFrame, seed: int) -> str:
    """Return what learned sink logits take; '' where keys have everything."""
    lost = rows.assign(lost=1 - rows["key_mass"])
    if not (lost["lost"] > 0).any():
        return ""
    return (
        f"take {_told(_mean(lost, 'lost', seed), percent)} of the softmax; all other shares here are "
        "of what the keys have."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending whole numbers as text: ``3, 5-9``."""
    breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
    parts = np.split(np.array(numbers, dtype=int), breaks) if numbers else []
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def _by_thirds(rows: pd.DataFrame, thirds: dict[str, list[int]], seed: int) -> HtmlTable:
    """Return means over the layers of each third, measures that apply nowhere left out."""
    known = rows["overlap"].notna()
    rows = rows.assign(is_lasting=rows["half_life_rows"].isna().astype(float).where(known))
    parts = [rows[rows["layer"].isin(part)] for part in thirds.values()]
    body: list[Iterable[str]] = []
    for label, column, write in _MEASURES:
        found = [_mean(part, column, seed) for part in parts]
        if any(one.n for one in found):
            body.append([label, *(_brief(one, write) for one in found)])
    n = rows["sequence_id"].nunique()
    return build(
        "table-attention",
        f"Level local: means over layers, then over n\u00a0=\u00a0{n} sequences, with 95\u00a0% "
        f"bootstrap intervals (seed {seed}). Top keys: the {schema.TOP_KEYS} largest of a row; "
        "shared: common keys over all keys of both (Jaccard). Half-life: rows until half of them "
        "are no longer on top; where more than half stay over all lags measured there is none, so "
        "that the mean of the others is too short",
        (text_column("measure"), *map(text_column, thirds)),
        body,
    )
