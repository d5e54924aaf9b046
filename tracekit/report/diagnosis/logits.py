"""Candidate sets that do not pay: their cost, what they miss, controllers, batches, copying."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.report.diagnosis.rule import Finding, Rule, rule
from tracekit.report.estimates import between
from tracekit.report.formats import count, number, percent
from tracekit.report.verdict.controllers import fixed_gains, points
from tracekit.report.verdict.schemes import COMPARED_SIZE, best_scheme, of_scheme
from tracekit.report.verdict.sides import all_of, is_below

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

CLASS_LIFT, CLASS_SHARE, CLASS_MISSES = 3.0, 0.20, 10
"""A class is missed so many times more than its share, has so much of all misses, of so many."""

SURE = 0.90
"""Probability of the most likely token from which a miss is plainly wrong."""

BATCH, BATCH_COST = 8, 0.50
"""Requests decoded together, and the part of the head's bytes that their union then reads."""

GAIN = 0.005
"""Share of steps: a controller that covers no more of them than fixed sizes is no better."""

_BEST = f"the best estimator at {COMPARED_SIZE} candidates"
_VOCAB = "an estimator that reads less than the full head (tracekit simulate --vocab)"


@rule(
    "Estimators cost more than the head",
    threshold="an estimator reads as much as the full head or more at its smallest size",
    cause="it searches the whole vocabulary before it names candidates",
    remedy="one that reads a part of it: lowrank, clustered, screened, previous",
    needs="an estimator (tracekit simulate --vocab)",
)
def dear_estimator(results: Results, options: Options) -> Finding | None:
    """Measure the cheapest size of each estimator."""
    del options
    curves = results.methods("vocab", "cost_frac")
    if not curves:
        return None
    least = {family: min(point.mean for point in curve) for family, curve in curves.items()}
    dear = [family for family, cost in least.items() if cost >= 1]
    worst = max(least, key=lambda family: (least[family], family))
    return Finding(
        bool(dear),
        f"{len(dear)} of {len(least)} estimators{': ' * bool(dear)}{', '.join(dear)}; the dearest, "
        f"{worst}, reads {percent(least[worst])} of the head's bytes, n\u00a0=\u00a0"
        f"{curves[worst][0].n}",
    )


@rule(
    "One kind of token is missed most",
    threshold=(
        f"{_BEST}: a class has {percent(CLASS_SHARE)} of the misses and {CLASS_LIFT:g} times its "
        f"share of steps, {CLASS_MISSES} misses or more in all"
    ),
    cause="its tokens are rare, or unlike what the estimator looks at",
    remedy="pin that class, or add a second estimator (first+second)",
    needs=_VOCAB,
)
def missed_class(results: Results, options: Options) -> Finding | None:
    """Measure the class with the largest lift."""
    del options
    best = best_scheme(results)
    if best is None:
        return None
    rows = of_scheme(results.table(schema.MISS_CLASSES), best)
    total = int(rows["num_misses"].sum())
    rows = rows[rows["miss_share"].notna() & (rows["num_misses"] > 0)]
    if rows.empty:
        return None
    large = rows[rows["miss_share"] >= CLASS_SHARE]
    one = (large if len(large) else rows).sort_values(["lift", "class"]).to_dict("records")[-1]
    return Finding(
        total >= CLASS_MISSES and one["lift"] >= CLASS_LIFT and one["miss_share"] >= CLASS_SHARE,
        f"{best.family}: {one['class']} has {percent(one['miss_share'])} of {count(total)} misses and "
        f"{percent(one['step_share'])} of steps, {number(one['lift'], 2)} times its share, "
        f"n\u00a0=\u00a0{best.n}",
    )


@rule(
    "Tokens that the model was sure of are pruned",
    threshold=f"{_BEST} misses a most likely token of probability {percent(SURE)} or more",
    cause="the set is named before the head runs, and does not see how sure it is",
    remedy=(
        "a larger set; a check that falls back to the full head (@fallback), or, where the estimator "
        "has one, a higher confidence= of it"
    ),
    needs=_VOCAB,
)
def sure_misses(results: Results, options: Options) -> Finding | None:
    """Count misses of certain tokens among those listed."""
    del options
    best = best_scheme(results)
    table = results.table(schema.MISSES)
    if best is None or table.empty:
        return None
    rows = of_scheme(table, best).sort_values("place")
    sure = rows[rows["best_prob"] >= SURE]
    total = int(rows["num_misses"].iloc[0]) if len(rows) else 0
    more = " or more" * (len(sure) == len(rows) < total)
    told = f"{best.family}: {len(sure)}{more} of {count(total)} misses"
    for row in rows.head(1).to_dict("records"):
        told += f"; the surest is {row['text']!r} at {percent(row['best_prob'])} in {row['sequence_id']}"
    return Finding(bool(len(sure)), f"{told}, n\u00a0=\u00a0{best.n}")


@rule(
    "The controller is no better than fixed sizes",
    threshold=(
        "share of hits with sizes that follow the state less that with fixed sizes of equal mean: "
        f"interval below {points(GAIN)} points, for every controller whose sizes differ"
    ),
    cause="the state that it follows does not tell which steps are hard",
    remedy="a fixed size: it needs no state",
    needs=(
        "an estimator with a controller whose sizes differ between steps, and the same with fixed "
        "sizes (tracekit simulate --vocab previous@rate)"
    ),
)
def idle_controller(results: Results, options: Options) -> Finding | None:
    """Measure sizes that follow the state against fixed ones; their timing is told apart."""
    del options
    able = [one for one in fixed_gains(results) if one.over_fixed.low is not None and one.is_varied]
    if not able:
        return None
    best = max(able, key=lambda one: (one.over_fixed.low or 0.0, one.name))
    timed = (
        f"; timing alone, against the same sizes at other steps: {points(best.timing.mean)} points "
        f"{between(best.timing, points)}"
        if best.timing.mean is not None
        else ""
    )
    below = [is_below(one.over_fixed.low, one.over_fixed.high, GAIN) for one in able]
    return Finding(
        False if False in below else all_of(below),
        f"{best.name}: {points(best.over_fixed.mean or 0)} points {between(best.over_fixed, points)} "
        f"over fixed sizes, at {best.size} candidates in the mean, the best of {len(able)}{timed}",
    )


@rule(
    "A batch eats the saving",
    threshold=f"{_BEST}: the union of {BATCH} requests reads {percent(BATCH_COST)} of the head or more",
    cause="each request names other candidates, and a batch reads the head once anyway",
    remedy="a shared list (frequency), smaller sets, or pruning at small batches only",
    needs=_VOCAB,
)
def eaten_by_batch(results: Results, options: Options) -> Finding | None:
    """Measure what the union of a batch reads."""
    del options
    best = best_scheme(results)
    rows = results.table(schema.BATCH_UNIONS)
    rows = of_scheme(rows, best) if best is not None else rows.iloc[:0]
    if best is None or rows.empty or BATCH not in set(rows["batch"]):
        return None
    by_batch = {row["batch"]: row for row in rows.to_dict("records")}
    alone, together = by_batch.get(1, by_batch[BATCH]), by_batch[BATCH]
    return Finding(
        together["cost_frac"] >= BATCH_COST,
        f"{best.family}: {percent(alone['cost_frac'])} of the head's bytes alone, "
        f"{percent(together['cost_frac'])} at batch {BATCH}, {together['num_draws']} batches drawn, "
        f"n\u00a0=\u00a0{together['n']}",
    )


LOGIT_RULES: tuple[Rule, ...] = (
    dear_estimator,
    missed_class,
    sure_misses,
    idle_controller,
    eaten_by_batch,
)
