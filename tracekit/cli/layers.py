"""The map of layers and rules for the terminal: who minds being changed, and who is protected."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from tracekit.schema import ALL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BAR = 8
"""Characters of the longest bar of a rule."""

RULES_A_TABLE = 4
"""Rules side by side, so that a table fits the terminal."""

HEADS = 10
"""KV heads that are listed of each rule, the most sensitive first."""

Rows = list[dict[str, Any]]


def layers_text(summary: Mapping[str, Sequence[Any]], gain: str | None = None) -> str:
    """Return the map of layers and rules, the layers to protect, and the most sensitive heads.

    Parameters
    ----------
    summary
        Columns of ``schema.LAYER_SUMMARY``.
    gain
        What a fitted budget gained, in a sentence; None if none was fitted.
    """
    from tracekit.simulate.sensitivity import PROTECTED

    names = list(summary)
    rows = [dict(zip(names, one, strict=True)) for one in zip(*summary.values(), strict=True)]
    if not rows:
        return "No layer was swept: no sequence has a row to score after the point of a rule."
    layers = [row for row in rows if row["kv_head"] == ALL]
    heads = [row for row in rows if row["kv_head"] != ALL]
    rules = list(dict.fromkeys(row["rule"] for row in layers))
    letters = {rule: _letter(number) for number, rule in enumerate(rules)}
    parts = [
        _map(
            [row for row in layers if row["rule"] in rules[start : start + RULES_A_TABLE]], letters
        )
        for start in range(0, len(rules), RULES_A_TABLE)
    ]
    parts.append("\n".join(_rule(letters[rule], rule, layers) for rule in rules))
    parts.append(_wrapped(f"! {PROTECTED}"))
    parts += [_heads(heads, letters)] if heads else []
    parts += [_wrapped(gain)] if gain is not None else []
    return "\n\n".join(parts)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"R{number}"


def _map(rows: Rows, letters: Mapping[str, str]) -> str:
    """Return the table of some rules: a layer a line, KL with a bar, protected layers marked."""
    from tracekit.cli.output import table

    rules = list(dict.fromkeys(row["rule"] for row in rows))
    cell = {(row["layer"], row["rule"]): row for row in rows}
    most = {
        rule: max((row["kl_nats"] or 0.0 for row in rows if row["rule"] == rule), default=0.0)
        for rule in rules
    }
    lines = [
        [str(layer), *(_cell(cell.get((layer, rule)), most[rule]) for rule in rules)]
        for layer in sorted({row["layer"] for row in rows})
    ]
    title = f"KL in nats a token, one layer changed at a time, level {rows[0]['level']}"
    return table(title, ["layer", *(letters[rule] for rule in rules)], lines)


def _cell(row: dict[str, Any] | None, most: float) -> str:
    """Return a KL, its bar, and the mark of a layer to protect."""
    from tracekit.cli.output import number

    if row is None or row["kl_nats"] is None:
        return "-"
    bar = "#" * round(BAR * row["kl_nats"] / most) if most > 0 else ""
    mark = "!" if row["is_protected"] else ""
    return f"{number(row['kl_nats']):<9} {bar:<{BAR}} {mark}".rstrip()


def _rule(letter: str, rule: str, layers: Rows) -> str:
    """Return what a letter stands for, on how much it rests, and the layers to protect."""
    rows = [row for row in layers if row["rule"] == rule]
    protected = [row for row in rows if row["is_protected"]]
    n = max(row["n"] for row in rows)
    if all(row["is_protected"] is None for row in rows):
        claim = "no claim of layers to protect"
    elif not protected:
        claim = "no layer stands out"
    else:
        share = sum(row["share"] or 0.0 for row in protected)
        some = ", ".join(str(row["layer"]) for row in protected)
        claim = f"protect {some}: {share:.0%} of the summed KL"
    noise = max(row["noise_kl_nats"] for row in rows)
    return (
        f"{_wrapped(f'{letter}  n = {n}, rounding {noise:.1g}; {claim}')}\n{_wrapped(f'   {rule}')}"
    )


def _heads(rows: Rows, letters: Mapping[str, str]) -> str:
    """Return the most sensitive KV heads of each rule."""
    from tracekit.cli.output import number, table

    lines = []
    for rule, letter in letters.items():
        ranked = [row for row in rows if row["rule"] == rule and row["rank"] is not None]
        for row in sorted(ranked, key=lambda one: one["rank"])[:HEADS]:
            share = "-" if row["share"] is None else f"{row['share']:.1%}"
            mark = "!" if row["is_protected"] else ""
            place = [str(row["layer"]), str(row["kv_head"])]
            lines.append([letter, *place, number(row["kl_nats"]), share, mark])
    title = f"the {HEADS} most sensitive KV heads, one changed at a time"
    return table(title, ["rule", "layer", "KV head", "kl_nats", "share", ""], lines)


def _wrapped(text: str) -> str:
    from tracekit.cli.output import WIDTH

    return textwrap.fill(text, WIDTH, subsequent_indent="   ", break_on_hyphens=False)
