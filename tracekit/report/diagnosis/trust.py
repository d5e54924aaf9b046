"""What else moves the numbers: a transform, the estimate itself, rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tracekit import schema
from tracekit.report.diagnosis.rule import Finding, Rule, rule
from tracekit.report.estimates import short
from tracekit.report.formats import number, percent
from tracekit.report.verdict.yardstick import yardsticks

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

RANK_BOUND, ORDER_BOUND, FACTOR_BOUND = 0.90, 0.80, 2.0
"""Rank correlation, share of pairs in order, and factor beyond which predictions mislead."""

NOISE_SHARE = 0.10
"""Cells whose KL is not above that of rounding."""


@rule(
    "Quantisation costs more than eviction",
    threshold=(
        "in the mean the transform alone loses more than the eviction alone, or it passes its stated "
        "bound"
    ),
    cause="the codes are too coarse for these keys or values",
    remedy="more bits or a longer residual=, or evict more and do not stack",
    needs="a policy stacked with a transform (tracekit simulate --kv h2o:kept=0.5+int4)",
)
def costly_transform(results: Results, options: Options) -> Finding | None:
    """Measure the transform against the eviction, at the highest level."""
    rows = results.table(schema.STACKING)
    rows = rows[(rows["n"] > 0) & (rows["measure"] != "output_error_sq")]
    for yardstick in yardsticks(results, options):
        part = rows[rows["level"] == yardstick.level]
        if part.empty:
            continue
        excess = part["transform_mean"] / part["eviction_mean"]
        worst = part.loc[excess.sort_values(kind="stable").index[-1:]].to_dict("records")[0]
        beyond = any(
            part[name].eq(True).any()
            for name in ("exceeds_error_bound", "exceeds_perplexity_bound")
        )
        return Finding(
            beyond or worst["transform_mean"] > worst["eviction_mean"],
            f"{worst['policy']}: {yardstick.name} {yardstick.write(worst['transform_mean'])} of the "
            f"transform alone, {yardstick.write(worst['eviction_mean'])} of the eviction alone; bounds "
            f"{'passed' if beyond else 'kept'}, level {yardstick.level}, n\u00a0=\u00a0{worst['n']}",
        )
    return None


@rule(
    "Predictions mislead",
    threshold=(
        f"rank correlation below {RANK_BOUND}, pairs in order below {percent(ORDER_BOUND)}, or off "
        f"by more than a factor {number(FACTOR_BOUND)} in the median"
    ),
    cause="too few probes, or losses beyond the reach of a second-order estimate",
    remedy="decide at level propagated, or record more probes",
    needs=f"{schema.ENOUGH_CELLS} cells at all levels (tracekit simulate --calibrate 3)",
)
def poor_prediction(results: Results, options: Options) -> Finding | None:
    """Measure the agreement of predicted with propagated KL."""
    del options
    rows = results.table(schema.CALIBRATION)
    rows = rows[(rows["level"] == "predicted") & (rows["group"] == schema.ANY)]
    found = {str(row["statistic"]): row for row in rows.to_dict("records")}
    names = ("spearman", "pairs_ordered", "propagated_over_predicted")
    if any(name not in found for name in names):
        return None
    rank, ordered, factor = (found[name]["value"] for name in names)
    cells, n = (found["spearman"][name] for name in ("num_cells", "num_sequences"))
    paired = found["pairs_ordered"]["num_cells"]
    if cells < schema.ENOUGH_CELLS or any(map(math.isnan, (rank, ordered, factor))):
        return None
    off = not 1 / FACTOR_BOUND <= factor <= FACTOR_BOUND
    return Finding(
        rank < RANK_BOUND or ordered < ORDER_BOUND or off,
        f"rank correlation {number(rank, 3)} over {cells} cells; {percent(ordered)} of pairs in order, "
        f"pairs of {paired} cells; propagated over predicted KL {number(factor, 3)} in the median; "
        f"n\u00a0=\u00a0{n}",
    )


@rule(
    "Differences drown in rounding",
    threshold=f"KL not above that of rounding alone in more than {percent(NOISE_SHARE)} of cells",
    cause="half precision: two runs of the same cell differ by as much",
    remedy="record and replay in float32, or compare larger evictions",
    needs="level propagated (tracekit simulate --level propagated)",
)
def under_noise(results: Results, options: Options) -> Finding | None:
    """Measure the cells at or below the noise floor."""
    del options
    rows = results.whole
    rows = rows[(rows["level"] == "propagated") & (rows["target_frac"] < 1)]
    rows = rows[rows["noise_kl_nats"].notna() & rows["kl_nats"].notna()]
    if rows.empty:
        return None
    below = rows["kl_nats"] <= rows["noise_kl_nats"]
    return Finding(
        bool(below.mean() > NOISE_SHARE),
        f"{below.sum()} of {len(rows)} cells; rounding makes {short(rows['noise_kl_nats'].mean())}"
        f"\u00a0nats a token in the mean, computed in {results.spec.dtype}, level propagated, "
        f"n\u00a0=\u00a0{rows['sequence_id'].nunique()}",
    )


TRUST_RULES: tuple[Rule, ...] = (costly_transform, poor_prediction, under_noise)
