"""``tracekit show RESULTS --policy``: what one policy does to next tokens, in llama.cpp's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracekit.cli.results_folder import read_rows
from tracekit.simulate.folder import read_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NAMES = ("unit", "value", "macro", "low", "high", "error")


def read_policy(folder: Path, policy: str, group: str) -> tuple[dict[str, Any], str]:
    """Return the statistics of the scored steps of a policy as data, and as text.

    Parameters
    ----------
    folder
        Of results with level propagated.
    policy
        Its text, ``snapkv:kept=0.3``, or its canonical text.
    group
        Which steps: ``all``, or a domain, a length, a distance, an entropy, as the table names it.

    Raises
    ------
    InputError
        If they are damaged or of another version, or hold no such policy at level propagated, or no such group.
    """
    from tracekit.cli.token_stats import token_stats_text
    from tracekit.errors import InputError
    from tracekit.measure.token_stats import Statistic
    from tracekit.schema import LOGIT_STATS

    seed = read_run(folder)["seed"]
    rows = read_rows(folder, LOGIT_STATS)
    if not rows:
        msg = f"{folder} holds no level propagated: simulate with --level propagated."
        raise InputError(msg)
    text = _canonical(policy, [row["policy"] for row in rows])
    groups = list(dict.fromkeys(row["group"] for row in rows if row["policy"] == text))
    records = [row for row in rows if (row["policy"], row["group"]) == (text, group)]
    if not records:
        msg = f"there is no group {group!r} of steps: choose one of {', '.join(groups)}."
        raise InputError(msg)
    statistics = [
        Statistic(name=row["statistic"], **{name: row[name] for name in _NAMES}) for row in records
    ]
    first, steps = records[0], max(row["num_steps"] for row in records)
    where = "" if group == "all" else f", {first['grouping']} {group}"
    title = (
        f"{policy}, kept_frac {first['kept_frac']:.3g}, level propagated{where}: {steps} steps of "
        f"{max(row['n'] for row in records)} sequences, convention {first['convention']}, seed "
        f"{seed}. Scored are the steps after the eviction point, each with all that its cache "
        "holds; perplexity is told of given text alone. A value takes all steps alike, macro all "
        "sequences alike, as tracekit show does."
    )
    return {"policy": policy, "statistics": records}, token_stats_text(title, statistics)


def _canonical(policy: str, policies: Sequence[str]) -> str:
    """Return the text under which the results hold a policy."""
    from tracekit.errors import InputError
    from tracekit.kv.parse import parse

    texts = list(dict.fromkeys(policies))
    text = parse(policy).text
    if text not in texts:
        held = "; ".join(_short(one) for one in texts)
        msg = f"level propagated was not run for {policy}: it was for {held}."
        raise InputError(msg)
    return text


def _short(text: str) -> str:
    """Return a policy's family and amount."""
    from tracekit.kv.amounts import kept_text
    from tracekit.kv.parse import parse

    policy = parse(text)
    selected = None if policy.selector is None else policy.selector.read
    amount = policy.kept if policy.scorer.evicts else selected
    return policy.family if amount is None else f"{policy.family} at {kept_text(amount)}"
