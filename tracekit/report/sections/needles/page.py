"""Early details of long texts: how much of the marked needles each policy still holds (B7)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tracekit.measure.stats import bootstrap_mean
from tracekit.report.blocks import Absent, Details, Section, Text
from tracekit.report.figures.needle_map import DEPTHS, Needle, depth_bin, needle_map
from tracekit.report.formats import percent, percent_range
from tracekit.report.sections.needles.loss import needle_loss
from tracekit.report.sections.needles.tables import Held, needle_list, policy_table
from tracekit.report.verdict.yardstick import CHANCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tracekit.report.blocks import Block
    from tracekit.report.load import Results
    from tracekit.report.options import Options

WANTED_FRAC = 0.25
"""Kept fraction near which policies are compared: little enough that details are at risk."""

ENOUGH_FOR_A_MAP = 8
"""Fewer needles are listed one by one: a map would be of empty cells."""

MOST_SHOWN = 6
"""Policies that are shown needle by needle; the table of policies has all."""

_AGAIN = "tracekit simulate TRACE -o NEW_RESULTS"


def section(results: Results, options: Options) -> Section | Absent:
    """Return what is left of the needles; ``Absent`` where none is marked, or none at risk."""
    del options
    whole = results.whole
    marked = whole[(whole["level"] == "local") & whole["needle_kept"].notna()]
    if marked.empty:
        model = results.spec.name
        return Absent(
            what="Needles: no text marks a detail to be found again (spans of kind needle)",
            command=f"tracekit record --model {model} --prompts core -o TRACE && {_AGAIN}",
        )
    risky = marked["num_evicted"] > 0
    needles = _needles(results, marked[risky].to_dict("records"))
    if not needles:
        return Absent(
            what="What is left of the needles: no policy evicted anything on their texts",
            command=f"{_AGAIN} --kv snapkv --kept {WANTED_FRAC:g}",
        )
    seed = results.run["seed"]
    policies = _policies(needles, marked[~risky]["policy"].value_counts().to_dict(), seed)
    idle = sorted(set(marked["family"]) - {one.family for one in policies})
    blocks: tuple[Block, ...] = (
        Text(text=_verdict(policies)),
        Text(text=_where(needles), look="note"),
        policy_table(policies, idle, WANTED_FRAC, seed),
        *_one_by_one([one for one in policies if not one.is_bound], seed),
        *needle_loss(results, {one.sequence_id for one in needles}, WANTED_FRAC),
    )
    return Section(
        name="needles",
        title="Needles: early details of long texts",
        short="Needles",
        blocks=blocks,
    )


def _needles(results: Results, rows: Sequence[Mapping[Any, Any]]) -> list[Needle]:
    """Return what each policy holds of each needle, by sequence."""
    places = {one["sequence_id"]: one for one in results.run["sequences"]}
    needles = []
    for row in rows:
        place = places[row["sequence_id"]]
        # Results of earlier versions do not tell the depth.
        depth = place.get("needle_depth_frac")
        needles.append(
            Needle(
                family=row["family"],
                policy=row["policy"],
                sequence_id=row["sequence_id"],
                kept_frac=row["kept_frac"],
                held_frac=row["needle_kept"],
                depth_frac=math.nan if depth is None else depth,
                length_tokens=place["context_end"] or place["prompt_end"] or place["num_tokens"],
                is_bound=not row["causal"],
                flags=", ".join(one for one in ("clipped", "clamped") if row[f"is_{one}"] is True),
            )
        )
    return sorted(needles, key=lambda one: one.sequence_id)


def _policies(needles: Sequence[Needle], num_idle: Mapping[Any, int], seed: int) -> list[Held]:
    """Return each family's policy nearest the wanted fraction: methods first, best first."""
    by_text: dict[str, list[Needle]] = {}
    for one in needles:
        by_text.setdefault(one.policy, []).append(one)
    every = [
        Held(tuple(of), bootstrap_mean([n.held_frac for n in of], seed=seed), num_idle.get(text, 0))
        for text, of in sorted(by_text.items())
    ]
    nearest: dict[str, Held] = {}
    for policy in sorted(every, key=lambda one: abs(one.kept_frac - WANTED_FRAC)):
        nearest.setdefault(policy.family, policy)
    return sorted(nearest.values(), key=lambda one: (one.is_bound, -one.mean, one.family))


def _verdict(policies: Sequence[Held]) -> str:
    methods = [one for one in policies if not one.is_bound]
    if not methods:
        return "Only bounds were tried on the needles: no decoder has them."
    best, worst = methods[0], methods[-1]
    text = f"{best.family} holds {best.text} of the needles' entries"
    if len(methods) > 1:
        text += f", the most of {len(methods)} policies; {worst.family} the least: {worst.text}"
    for blind in methods[1:-1]:
        if blind.family == CHANCE:
            text += f". random, which does not look, holds {blind.text}"
    return (
        f"Level local, each at its kept fraction nearest {percent(WANTED_FRAC)}: {text}. What is "
        "held can be read; whether the model still finds it, only the levels propagated and "
        "generated tell."
    )


def _where(needles: Sequence[Needle]) -> str:
    """Return where the needles lie, and which depths nothing is said of."""
    depths = {one.sequence_id: one.depth_frac for one in needles}
    known = [depth for depth in depths.values() if not math.isnan(depth)]
    n = f"n\u00a0=\u00a0{len(depths)} needles"
    if not known:
        return f"{n}; these results do not tell how deep they lie: simulate into a new folder."
    text = f"{n} at depths of {percent_range(min(known), max(known))} of their texts"
    text += f", {len(depths) - len(known)} of unknown depth" if len(known) < len(depths) else ""
    covered = {depth_bin(depth) for depth in known}
    missing = [name for at, name in enumerate(DEPTHS) if at not in covered]
    if not missing:
        return f"{text}."
    return f"{text}. No needle, so nothing said, at depths of {', '.join(missing)}."


def _one_by_one(methods: Sequence[Held], seed: int) -> list[Block]:
    """Return the map of up to six policies, or a list of the needles where they are few."""
    shown = [needle for one in methods[:MOST_SHOWN] for needle in one.needles]
    if not shown:
        return []
    blocks: list[Block] = []
    if len(methods) > MOST_SHOWN:
        text = (
            f"Next, needle by needle: the {MOST_SHOWN} of {len(methods)} policies that hold most."
        )
        blocks.append(Text(text=text, look="note"))
    placed = [one for one in shown if not math.isnan(one.depth_frac)]
    if len({one.sequence_id for one in placed}) >= ENOUGH_FOR_A_MAP:
        return [*blocks, needle_map(placed, seed)]
    if len({one.sequence_id for one in shown}) >= ENOUGH_FOR_A_MAP:
        return [Absent(what="The map of needles by depth and length", command=_AGAIN)]
    return [Details(summary="Needle by needle", blocks=(*blocks, needle_list(shown)))]
