"""What a sweep over layers does to each of them, and the budget that is to be fitted from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.kv.amounts import Frac, parse_kept
from tracekit.kv.parse import parse
from tracekit.live.layer_rule import LayerRule, PolicyRule, parse_rule
from tracekit.simulate.fit_budget import refuse_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tracekit.kv.policy import Policy

ROWS = "rows:"
"""How rules begin that are no policies."""

RULES = ("rows:0.03", "h2o:kept=0.3,every=16", "snapkv:kept=0.3")
"""Rules that run when none are named."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Which layers mind: rules that are applied to one layer at a time.

    Parameters
    ----------
    rules
        What is done to a layer.
    heads
        Whether each KV head is changed alone as well.
    fit_to
        File of the budget that is fitted from it; None: none is.
    fit_kept
        Fraction that the fitted budget keeps of all layers together.
    """

    rules: tuple[LayerRule, ...]
    heads: bool = False
    fit_to: Path | None = None
    fit_kept: float = 0.3


def make_sweep(
    rules: Sequence[str] = (),
    *,
    kept: Sequence[float | str] = (),
    heads: bool = False,
    fit_to: Path | None = None,
    fit_kept: float = 0.3,
) -> Sweep:
    """Return the sweep over layers for rules given as text.

    Parameters
    ----------
    rules
        ``rows:0.03``, or policies; none: ``RULES``.
    kept
        Amounts kept by policies that name none.
    heads, fit_to, fit_kept
        See ``Sweep``.

    Raises
    ------
    UsageError
        If a rule does not exist, or a budget is to be fitted but not one policy alone has several
        amounts.
    """
    made: dict[str, LayerRule] = {}
    for text in rules or RULES:
        for rule in _rules(text, kept):
            made[rule.text] = rule
    if fit_to is not None:
        refuse_name(fit_to)
        _refuse_fit([parse(text) for text in made if not text.startswith(ROWS)], fit_kept)
    return Sweep(rules=tuple(made.values()), heads=heads, fit_to=fit_to, fit_kept=fit_kept)


def _refuse_fit(policies: Sequence[Policy], fit_kept: float) -> None:
    """Raise if no budget can be fitted from the KL under some policies."""
    amounts: dict[str, list[float]] = {}
    for policy in policies:
        if policy.kept is not None and policy.kept.unit == Frac.unit:
            amounts.setdefault(policy.family, []).append(policy.kept.amount)
    curves = {family: fractions for family, fractions in amounts.items() if len(fractions) > 1}
    if len(curves) != 1:
        msg = (
            "a budget is fitted from one policy at several amounts, not from "
            f"{', '.join(curves) or 'none'}: give --rule snapkv, say, with --kept 0.1,0.5."
        )
        raise UsageError(msg)
    ((_, fractions),) = curves.items()
    if not min(fractions) <= fit_kept <= 1:
        msg = (
            f"--fit-kept {fit_kept:g} is not between the least measured, {min(fractions):g}, and 1."
        )
        raise UsageError(msg)


def _rules(text: str, kept: Sequence[float | str]) -> list[LayerRule]:
    """Return the rule of a text, or one an amount where it names none."""
    if text.startswith(ROWS):
        return [parse_rule(text)]
    policy = parse(text)
    if not policy.is_open:
        return [PolicyRule(policy)]
    return [PolicyRule(policy.with_kept(parse_kept(str(amount)))) for amount in kept]
