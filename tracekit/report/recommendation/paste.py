"""A policy as a TOML file for ``tracekit simulate --config``, with what is known of it as comments."""

from __future__ import annotations

import math
import re
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema
from tracekit.report.formats import visible
from tracekit.report.recommendation.damage import LEVEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.report.load import Results

_WIDTH = 96  # Characters of a line of comment.
_KEPT = re.compile(r"(?<=[:,])kept=[^,+]+")
_SHORT_ESCAPES = {ord('"'): '\\"', ord("\\"): "\\\\"}


def config_text(results: Results, policy: str, said: Sequence[str]) -> str:
    """Return the text of a file that replays a policy as it was replayed here.

    Parameters
    ----------
    results
        Where model, run and settings come from.
    policy
        Canonical text.
    said
        Sentences that stand above it, as comments.

    Returns
    -------
    str
        TOML. Whatever stands in names, comments stay comments and texts stay whole. An alternative
        by layers is a comment too: it was not replayed.
    """
    run, spec = results.run, results.spec
    comments = [
        f"Model {spec.name}, fingerprint {spec.fingerprint}; trace {run['trace']['run_id']}.",
        *said,
    ]
    plan = run["plan"]
    lines = [
        *map(_comment, comments),
        "[simulate]",
        f"kv = [{quoted(policy)}]",
        f"level = {quoted(LEVEL)}",
        f"seed = {int(run['seed'])}",
        f"kv-bytes = {int(plan['kv_bytes'])}",
    ]
    if (convention := plan.get("convention", "tracekit")) != "tracekit":
        lines.append(f"convention = {quoted(convention)}")
    if tiered := tiered_policy(results, policy):
        text, why = tiered
        lines += ["", _comment(why), f"# kv = [{quoted(text)}]"]
    return "\n".join(lines) + "\n"


def tiered_policy(results: Results, policy: str) -> tuple[str, str] | None:
    """Return the policy with the layers' recommended kept fractions as two tiers, and why.

    Parameters
    ----------
    results
        Their ``recommended`` table has a kept fraction a layer, from attention mass alone.
    policy
        Canonical text.

    Returns
    -------
    tuple, or None
        Text and sentence; None where there are no such fractions, where they make two equal tiers or
        keep everything, or where the policy evicts nothing or has a budget over layers of its own.
    """
    rows = results.table(schema.RECOMMENDED).sort_values("layer")
    kept_L = rows["kept_frac"].to_numpy(np.float64)
    name, _, rest = policy.partition(":")
    first = rest.partition("+")[0]
    if len(kept_L) < 2 or name == "full" or "layers=" in first or not _KEPT.search(policy):
        return None
    split, shallow, deep = two_tiers(kept_L)
    depth = math.floor(1000 * split / (len(kept_L) - 1)) / 1000
    kept = min(1.0, math.ceil(100 * kept_L.mean()) / 100)
    if kept >= 1 or shallow == deep:
        return None
    items = f"kept={kept:g}"
    budget = f",layers=tiers,shallow={shallow:g},deep={deep:g},deep_from={depth:g}"
    own, plus, attached = _KEPT.sub(items, policy, count=1).partition("+")
    why = (
        f"NOT CERTIFIED, not replayed here: the same policy with what each layer's attention "
        f"suggests (level local, {100 * rows['mass_frac'].iloc[0]:.3g} % of the mass, n = "
        f"{int(rows['n'].max())} sequences), put into two tiers; it keeps {kept:g} of the tokens "
        "seen. Replay it before use."
    )
    return f"{own}{budget}{plus}{attached}", why


def two_tiers(kept_frac_L: np.ndarray) -> tuple[int, float, float]:
    """Return where deep layers start, and what shallow and deep layers keep at least.

    Parameters
    ----------
    kept_frac_L
        Kept fraction of each of two or more layers.

    Returns
    -------
    split
        Number of the first deep layer, at least 1: two means fit best in squares (the first of
        several such).
    shallow, deep
        The two means, rounded down to hundredths, so that their floors fit into the mean of all.
    """
    squares = [
        kept_frac_L[:split].var() * split + kept_frac_L[split:].var() * (len(kept_frac_L) - split)
        for split in range(1, len(kept_frac_L))
    ]
    split = 1 + int(np.argmin(np.round(squares, 12)))
    tiers = kept_frac_L[:split].mean(), kept_frac_L[split:].mean()
    shallow, deep = (math.floor(100 * float(one)) / 100 for one in tiers)
    return split, shallow, deep


def quoted(text: str) -> str:
    """Return a text as a basic string of TOML; all but printable ASCII is escaped."""
    escaped = (
        _SHORT_ESCAPES.get(ord(char), char) if " " <= char <= "~" else f"\\U{ord(char):08X}"
        for char in text
    )
    return f'"{"".join(escaped)}"'


def _comment(text: str) -> str:
    """Return a text as lines of comment."""
    words = visible(" ".join(text.split()))
    return textwrap.fill(words, _WIDTH, initial_indent="# ", subsequent_indent="# ")
