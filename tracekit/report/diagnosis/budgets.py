"""Budgets that do not do what was asked: too small, never short, not freed, eaten by state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.diagnosis.rule import Finding, Rule, over, rule
from tracekit.report.formats import percent

if TYPE_CHECKING:
    import pandas as pd

    from tracekit.report.load import Results
    from tracekit.report.options import Options

CLIPPED_SHARE = 0.10
"""Cells whose budget is smaller than what is protected."""

IDLE_SHARE = 0.10
"""Cells in which nothing is evicted."""

FREED_SHARE = 0.50
"""Of the evicted bytes, those that a rectangular cache frees."""

STATE_SHARE = 0.10
"""Bytes of a policy's own state over the bytes that it holds."""

_POLICIES = "a policy that evicts (tracekit simulate --kv)"


def _cells(results: Results) -> pd.DataFrame:
    """Return evicting cells of the level with most of them: a policy on a sequence."""
    rows = results.whole
    rows = rows[(rows["target_frac"] < 1) & rows["causal"].eq(True)]
    return rows[rows["level"] == results.levels[0]] if results.levels else rows


def _flagged(results: Results, flag: str, share: float) -> Finding | None:
    """Return how many cells have a flag, and which policy has most."""
    rows = _cells(results)
    if rows.empty:
        return None
    flags = rows[flag].eq(True)
    by_family = flags.groupby(rows["family"]).agg(["sum", "size"]).sort_values("sum", kind="stable")
    most = by_family.iloc[-1]
    named = f", most in {by_family.index[-1]} ({most['sum']} of {most['size']})" * bool(most["sum"])
    return Finding(
        bool(flags.mean() > share),
        f"{flags.sum()} of {len(rows)} cells ({percent(flags.mean())}){named}, {over(rows)}",
    )


@rule(
    "The kept fraction has no effect: scores have no say",
    threshold=f"budget below what is protected (clipped) in more than {percent(CLIPPED_SHARE)} of cells",
    cause="the protected window is larger than the budget of short prompts",
    remedy="a smaller window= or recent=, a larger kept=, or longer prompts",
    needs=_POLICIES,
)
def window_too_large(results: Results, options: Options) -> Finding | None:
    """Measure clipped cells."""
    del options
    return _flagged(results, "is_clipped", CLIPPED_SHARE)


@rule(
    "Nothing is evicted",
    threshold=f"idle in more than {percent(IDLE_SHARE)} of cells",
    cause="the budget in tokens is never short on these prompts",
    remedy="a kept= that is a fraction, a smaller budget, or longer prompts",
    needs=_POLICIES,
)
def never_short(results: Results, options: Options) -> Finding | None:
    """Measure idle cells."""
    del options
    return _flagged(results, "is_idle", IDLE_SHARE)


@rule(
    "Heads with budgets of their own free little memory",
    threshold=f"a rectangular cache frees less than {percent(FREED_SHARE)} of what is evicted",
    cause="the longest head sets the size of a padded cache",
    remedy="a cache that stores heads apart (variable length), or a larger safeguard=",
    needs="a policy with heads=adaptive (tracekit simulate --kv adakv)",
)
def padding(results: Results, options: Options) -> Finding | None:
    """Measure what padding leaves of the saving."""
    del options
    rows = _cells(results)
    rows = rows[rows["policy"].str.contains("heads=adaptive") & rows["padded_frac"].notna()]
    if rows.empty:
        return None
    padded, kept = (rows.groupby("family")[one].mean() for one in ("padded_frac", "kept_frac"))
    freed = (1 - padded) / (1 - kept)
    worst = str(freed.idxmin())
    return Finding(
        bool(freed[worst] < FREED_SHARE),
        f"{worst} holds {percent(kept[worst])}, and {percent(padded[worst])} when padded: "
        f"{percent(freed[worst])} of the evicted bytes are freed, mean over fractions, {over(rows)}",
    )


@rule(
    "The policy itself needs memory",
    threshold=f"state above {percent(STATE_SHARE)} of the bytes held, mean of a policy",
    cause="scores, indices or page bounds are kept for every entry",
    remedy="a policy without accumulated scores, or one decision at=prompt",
    needs=_POLICIES,
)
def heavy_state(results: Results, options: Options) -> Finding | None:
    """Measure the largest state."""
    del options
    rows = _cells(results)
    rows = rows[rows["state_bytes"].notna() & (rows["kv_bytes"] > 0)]
    if rows.empty:
        return None
    share = (rows["state_bytes"] / rows["kv_bytes"]).groupby(rows["family"]).mean()
    worst = str(share.idxmax())
    return Finding(
        bool(share[worst] > STATE_SHARE),
        f"{worst}: {percent(share[worst])} of the bytes held, the most of {len(share)} policies, "
        f"{over(rows)}",
    )


BUDGET_RULES: tuple[Rule, ...] = (window_too_large, never_short, padding, heavy_state)
