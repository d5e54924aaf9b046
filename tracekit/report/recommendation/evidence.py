"""What a recommendation stands on, as tables and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Block, Details, Facts, Items, Text
from tracekit.report.formats import NOTHING, number, percent, percent_range
from tracekit.report.recommendation.damage import LEVEL
from tracekit.report.tables import INTERVAL, Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from tracekit.report.options import Options
    from tracekit.report.recommendation.chain import Candidate
    from tracekit.report.recommendation.recommend import Recommendation

_LEFT_OUT = (
    "look ahead: bounds that no decoder has",
    "choose what to read and free no memory",
    "lack a sequence: what was not run is not taken for safe",
    "save nothing on the choosing prompts",
    "are clipped on most choosing prompts: what was measured is not what their text says",
    "are beaten by another one in both safety and saving on the choosing prompts",
)


def goal(options: Options) -> str:
    """Return what is to be certified, in words."""
    return (
        f"at most {percent(options.alpha)} of prompts damaged with a confidence of "
        f"{percent(1 - options.delta)}"
    )


def evidence(found: Recommendation, what: str, options: Options, name: str) -> list[Block]:
    """Return the tests, what holds by domain, what holds in expectation, and what was left out.

    Parameters
    ----------
    found
        The recommendation.
    what
        What damages a prompt, in words.
    options
        ``alpha`` and ``delta``.
    name
        Of the loss, for the names of tables.
    """
    blocks: list[Block] = []
    if found.overall.candidates:
        texts = tuple((one.name, one.policy) for one in found.overall.candidates)
        blocks += [
            _chain_table(found, what, options, name),
            Details(summary="The full texts of these policies", blocks=(Items(items=texts),)),
            Text(text=_in_expectation(found, options)),
            _domain_table(found, what, options, name),
        ]
    if counts := _left_out(found):
        summary = "What is no candidate, counted"
        blocks.append(Details(summary=summary, blocks=(Facts(facts=counts),)))
    return blocks


def _chain_table(found: Recommendation, what: str, options: Options, name: str) -> HtmlTable:
    columns = (
        text_column("policy"),
        Column("kept (bytes)", percent),
        INTERVAL,
        text_column("damaged, choosing"),
        text_column("damaged, judging"),
        Column("share at most", percent),
        Column("p", number),
        text_column("test"),
        text_column("flagged, judging"),
    )
    caption = (
        f"Tests in their order, level {LEVEL}, damaged: {what}; {found.num_judging} prompts judge, "
        "kept is what they kept. "
        f"Share at most: with a confidence of {percent(1 - options.delta)}, for that row alone. The "
        f"chain of tests holds as a whole at {options.delta:g}"
    )
    return build(f"table-certified-{name}", caption, columns, map(_row, found.overall.candidates))


def _row(one: Candidate) -> list[object]:
    low, high = one.kept.low, one.kept.high
    interval = NOTHING if low is None or high is None else percent_range(low, high)
    test = "certified" if one.is_certified else "not certified" if one.is_tested else "not reached"
    counts = {"idle": one.num_idle, "clipped": one.num_clipped, "clamped": one.num_clamped}
    flagged = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return [
        one.name,
        one.kept.mean,
        interval,
        f"{one.chosen_damaged} of {one.chosen_n}",
        f"{one.damaged} of {one.n}",
        one.upper,
        one.p_value,
        test,
        flagged or "none",
    ]


def _domain_table(found: Recommendation, what: str, options: Options, name: str) -> HtmlTable:
    """Return each domain's own chain of tests, in the order of all domains together."""
    shown = found.overall.certified or found.lead
    assert shown is not None
    columns = (
        text_column("domain"),
        text_column("certified here"),
        Column("kept (bytes)", percent),
        text_column(f"damaged by {shown.name}"),
        Column("share at most", percent),
    )
    caption = (
        f"By domain, level {LEVEL}, damaged: {what}. Each row is a statement of its own "
        f"({goal(options)}), the rows do not hold jointly; each needs at least {found.needed} "
        "prompts that judge"
    )
    rows = []
    for chain in found.by_domain:
        best, n = chain.certified, chain.n
        here = [one for one in chain.candidates if one.policy == shown.policy]
        nothing = f"too few: {n} of {found.needed}" if n < found.needed else "nothing"
        counts = [f"{one.damaged} of {one.n}" for one in here] or [NOTHING]
        rows.append(
            [
                chain.domain,
                best.name if best else nothing,
                best.kept.mean if best else None,
                counts[0],
                here[0].upper if here else None,
            ]
        )
    return build(f"table-certified-domains-{name}", caption, columns, rows)


def _in_expectation(found: Recommendation, options: Options) -> str:
    """Return what conformal risk control says of the family that the choosing prompts took."""
    assert found.conformal is not None
    assert found.favourite is not None
    conformal, chosen = found.conformal
    start = f"A weaker statement, in expectation, for {found.favourite.family}: "
    if conformal.n < found.needed_conformal:
        return (
            f"{start}none, {conformal.n} prompts judge and {found.needed_conformal} are the least that "
            "conformal risk control needs."
        )
    if chosen is None:
        return (
            f"{start}none of its kept fractions brings the chance that a new prompt is damaged to "
            f"{percent(options.alpha)} (conformal risk control, n\u00a0=\u00a0{conformal.n})."
        )
    made = (
        ""
        if conformal.was_monotone
        else " Some prompts were damaged more at a larger budget: each counts as damaged at all "
        "smaller budgets too, which errs on the safe side."
    )
    return (
        f"{start}at {chosen.name} ({percent(chosen.kept.mean or 0.0)} of the bytes) a new prompt is "
        f"damaged with a chance of at most {percent(options.alpha)}, mean over draws of these "
        f"{conformal.n} prompts and the new one (conformal risk control, Angelopoulos et al. 2022; "
        f"bound {percent(conformal.bound)}).{made}"
    )


def _left_out(found: Recommendation) -> tuple[tuple[str, str], ...]:
    damage, order = found.damage, found.order
    numbers = (
        damage.num_bounds,
        damage.num_selecting,
        damage.num_incomplete,
        order.num_saveless,
        order.num_clipped,
        order.num_beaten,
    )
    counts = [
        (f"{n} policies" if n > 1 else "1 policy", why)
        for n, why in zip(numbers, _LEFT_OUT, strict=True)
        if n
    ]
    if n := damage.num_prompts_without:
        counts.append((f"{n} prompts" if n > 1 else "1 prompt", "have no result that counts here"))
    return tuple(counts)
