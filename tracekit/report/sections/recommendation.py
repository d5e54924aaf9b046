"""Which policy to use, and what is certified of it on prompts that did not choose it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Absent, Block, Code, Details, Framed, Heading, Section, Text
from tracekit.report.formats import number, percent, percent_range, size
from tracekit.report.recommendation.damage import LEVEL, answer_damage, kl_damage
from tracekit.report.recommendation.evidence import evidence, goal
from tracekit.report.recommendation.paste import config_text
from tracekit.report.recommendation.recommend import Recommendation, recommend

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options
    from tracekit.report.recommendation.chain import Candidate


def section(results: Results, options: Options) -> Section | Absent:
    """Return the recommendation by propagated KL, and by marked answers where there are any."""
    damage = kl_damage(results, options)
    if not damage.prompts:
        return Absent(
            what="A recommended policy with what is certified of it: it needs level propagated.",
            command="tracekit simulate TRACE -o RESULTS --level local,propagated",
        )
    seed = int(results.run["seed"])
    found = recommend(damage, options, seed=seed)
    what = f"a propagated KL above {options.kl_bound_nats:g} nats a token"
    blocks: list[Block] = [
        Framed(blocks=(Text(text=_verdict(found, options), look="verdict"),)),
        Text(text=_rule(found, what, options), look="rule"),
        *_noise(results, options),
        *_paste(results, found, what, options),
        *evidence(found, what, options, "kl"),
    ]
    by_answer = answer_damage(results)
    if by_answer.prompts:
        blocks += _answers(recommend(by_answer, options, seed=seed), options)
    return Section(
        name="recommendation",
        title="Which policy to use",
        short="Recommendation",
        blocks=tuple(blocks),
    )


def _verdict(found: Recommendation, options: Options, use: str = "Use {}.") -> str:
    """Return the answer in sentences: what is certified, or why nothing is."""
    best, lead = found.overall.certified, found.lead
    if best is not None:
        return (
            f"{use.format(best.name)} {_held(best)} It damaged {best.damaged} of {best.n} prompts that "
            f"judged it. {_promise(options)}"
        )
    if found.num_judging < found.needed or not found.num_choosing:
        why = (
            f"No policy can be certified, there are too few prompts: {found.num_judging} judge, and at "
            f"least {found.needed} without a damaged one must ({found.needed_prompts} in all, since "
            f"one in three chooses). To be shown: {goal(options)}."
        )
    elif lead is None:
        return "No policy is certified: none is a candidate; the list below says why."
    else:
        safest = found.overall.candidates[0]
        why = (
            f"No policy is certified for {goal(options)}: the safest candidate, {safest.name}, "
            f"damaged {safest.damaged} of {safest.n} prompts that judged it (p = "
            f"{number(safest.p_value)}, to be at most {options.delta:g})."
        )
    if lead is None:
        return why
    return (
        f"{why} A lead, not certified: {lead.name} damaged {lead.damaged} of {lead.n} prompts that "
        f"judged it. It was picked on these very prompts; on others it may damage more. {_held(lead)}"
    )


def _held(one: Candidate) -> str:
    mean, low, high, n = one.kept.mean, one.kept.low, one.kept.high, one.kept.n
    assert mean is not None
    interval = (
        "no interval below 3 prompts"
        if low is None or high is None
        else f"95\u00a0% interval {percent_range(low, high)}"
    )
    return (
        f"It holds {percent(mean)} of the full cache's bytes ({interval}, n\u00a0=\u00a0{n} prompts): "
        f"{size(one.kv_bytes)} of {size(one.full_kv_bytes)}, mean over their scored steps."
    )


def _promise(options: Options) -> str:
    return (
        f"With a confidence of {percent(1 - options.delta)}, it damages at most "
        f"{percent(options.alpha)} of prompts drawn as these were (level {LEVEL})."
    )


def _rule(found: Recommendation, what: str, options: Options) -> str:
    """Return how the policy was chosen and tested."""
    return (
        f"The rule: a prompt is damaged if any of its sequences has {what} (level {LEVEL}, mean over "
        "its scored tokens); one in which nothing was evicted is not. One prompt in three chooses "
        f"({found.num_choosing}), the others judge ({found.num_judging}). The choosing prompts order "
        "the policies from the safest to the largest saving: by their share of damaged prompts, "
        "equal ones by the KL that all but the allowed share stay below, without those that "
        "another one beats in both. The judging prompts test them in this order, by the exact "
        f"binomial tail, until one fails at {options.delta:g}: learn then test (Angelopoulos et al. "
        "2021), which assumes nothing but that new prompts come as these did. The confidence is that "
        f"of the procedure: the chance that it certifies anything wrong is at most {options.delta:g}. "
        "It is not the share of wrong ones among certified policies, which may be larger where few are "
        "certified."
    )


def _noise(results: Results, options: Options) -> list[Block]:
    rows = results.whole[results.whole["level"] == LEVEL]
    noisy = rows[rows["noise_kl_nats"] >= options.kl_bound_nats]
    if noisy.empty:
        return []
    text = (
        f"The bound lies within rounding: in {len(noisy)} of {len(rows)} cells rounding alone makes a "
        f"KL of {options.kl_bound_nats:g} nats a token or more. Record in a wider type, or raise "
        "--kl-bound."
    )
    return [Text(text=text, look="caution")]


def _paste(results: Results, found: Recommendation, what: str, options: Options) -> list[Block]:
    """Return the file to replay the policy with."""
    best = found.overall.certified
    shown = best or found.lead
    if shown is None:
        return []
    counts = (
        f"{shown.damaged} of {shown.n} judging prompts damaged, by {what}; "
        f"{percent(shown.kept.mean or 0.0)} of the full cache's bytes held."
    )
    wanted = f"{goal(options)} (alpha = {options.alpha:g}, delta = {options.delta:g})"
    said = (
        f"Certified at level {LEVEL}: {wanted}; {counts}"
        if best
        else f"NOT CERTIFIED for {wanted}, at level {LEVEL}: {counts}"
    )
    caption = "To be saved as FILE.toml: tracekit simulate TRACE -o RESULTS --config FILE.toml" + (
        "" if best else ". A policy to try on more prompts, not certified"
    )
    text = config_text(results, shown.policy, [said])
    return [Code(name="recommended-config", caption=caption, text=text)]


def _answers(found: Recommendation, options: Options) -> list[Block]:
    """Return the same by marked answers: another loss, a statement of its own."""
    what = "a wrong token of a marked answer that the full cache got right"
    return [
        Heading(text="By marked answers"),
        Text(
            text=f"The same rule by another loss: a prompt is damaged by {what}. It holds at its own "
            "confidence, not jointly with the one above; to trust both, use a policy that the tests "
            "of both certify."
        ),
        Text(text=_verdict(found, options, "By this loss alone, {} is certified.")),
        Details(
            summary="The tests by marked answers",
            blocks=tuple(evidence(found, what, options, "answers")),
        ),
    ]
