"""Statistics of next tokens as text, in the order and layout of llama.cpp's perplexity tool."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tracekit.cli.output import WIDTH, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.measure.token_stats import Statistic

_DELTA_P = "\N{GREEK CAPITAL LETTER DELTA}p"

_LABELS = {
    "ppl_pruned": "Mean PPL(pruned)",
    "ppl_full": "Mean PPL(full)",
    "nll_correlation": "Cor(ln(PPL(pruned)), ln(PPL(full))), %",
    "ln_ppl_change": "Mean ln(PPL(pruned)/PPL(full))",
    "ppl_quotient": "Mean PPL(pruned)/PPL(full)",
    "ppl_difference": "Mean PPL(pruned)-PPL(full)",
    "delta_p_rms": f"RMS {_DELTA_P}",
    "same_top_frac": "Same top p",
    "jsd_mean": "Mean JSD, nats",
    "margin_full_mean": "Mean margin(full), nats",
    "margin_pruned_mean": "Mean margin(pruned), nats",
    "num_flips": "Flips",
    "num_left_out": "Left out: no distribution",
    "exact_match_pruned": "Exact match(pruned), %",
    "exact_match_full": "Exact match(full), %",
}

_ENDS = {"mean": "Mean", "max": "Maximum", "median": "Median", "min": "Minimum"}

_SECTIONS = {
    "Perplexity": ("ppl_", "nll_", "ln_ppl_"),
    "KL divergence, nats": ("kl_",),
    "Token probability, %": ("delta_p_", "same_top_"),
    "Beyond llama.cpp": ("jsd_", "margin_", "num_", "exact_match_"),
}
"""Title of each table, and how the names of its statistics begin."""

_PER_CENT = ("delta_p_", "same_top_", "exact_match_", "nll_correlation")

_LEAST = 1e-4


def token_stats_text(title: str, statistics: Sequence[Statistic]) -> str:
    """Return statistics as tables that fit 100 columns, those of ``token_statistics``.

    Parameters
    ----------
    title
        What they are of: level, convention, sequences, tokens, seed.
    statistics
        In order; those of ``exact_match`` may follow. Null is a dash; columns without a number are
        left out.
    """
    parts = [textwrap.fill(title, WIDTH)]
    for name, prefixes in _SECTIONS.items():
        if rows := [one for one in statistics if one.name.startswith(prefixes)]:
            parts.append(_section(name, rows))
    return "\n\n".join(parts)


def _section(title: str, statistics: Sequence[Statistic]) -> str:
    columns = {
        "": [_label(one.name) for one in statistics],
        "value": [_number(one, one.value) for one in statistics],
        "\N{PLUS-MINUS SIGN}": [_number(one, one.error) for one in statistics],
        "interval": [_interval(one) for one in statistics],
        "macro": [_number(one, one.macro) for one in statistics],
    }
    shown = {
        name: cells
        for name, cells in columns.items()
        if name in {"", "value"} or any(cell != "-" for cell in cells)
    }
    return table(title, list(shown), list(zip(*shown.values(), strict=True)))


def _label(name: str) -> str:
    """Return what llama.cpp calls a statistic, with pruned and full for Q and base."""
    if name in _LABELS:
        return _LABELS[name]
    measure, _, place = name.rpartition("_")
    shown = _ENDS.get(place) or f"{float(place.removeprefix('p')):.1f}%"
    return f"{shown:<8}{'KLD' if measure == 'kl' else _DELTA_P}"


def _interval(one: Statistic) -> str:
    if one.low is None or one.high is None:
        return "-"
    return f"[{_number(one, one.low)}, {_number(one, one.high)}]"


def _number(one: Statistic, value: float | None) -> str:
    """Return a number with llama.cpp's decimals, or its magnitude where these would hide it."""
    if value is None:
        return "-"
    if one.unit == "tokens":
        return f"{value:.0f}"
    if one.name.startswith(_PER_CENT):
        return f"{100 * value:.3f}"
    return f"{value:.2e}" if 0 < abs(value) < _LEAST else f"{value:.6f}"
