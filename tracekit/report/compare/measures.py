"""What two sets of results are compared by: each measure, its unit, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.errors import UsageError
from tracekit.registry import unknown

KV, VOCAB, LAYERS, RECORDED = "kv", "vocab", "layers", "recorded"
"""Questions that have measures; ``recorded`` is what the trace itself says of its sequences."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of a policy, candidate set, layer or recording on a sequence.

    Parameters
    ----------
    name
        What it is called here.
    question
        Table that it is of.
    column, minus
        Column of that table, and the column that is taken off it, if any.
    unit
        Empty for a share.
    better
        1: more is better; -1: less is better; 0: neither by itself.
    alias
        Short name for the command line.
    is_per_token
        A mean over tokens, or a number of them: it means another thing with another tokenizer.
    needs_given
        Says something only where both sides read the same given text.
    is_headline
        Shown where no measure was asked for.
    """

    name: str
    question: str
    column: str
    minus: str | None = None
    unit: str = ""
    better: int = 0
    alias: str = ""
    is_per_token: bool = True
    needs_given: bool = False
    is_headline: bool = False


_NATS = "nats a token"

MEASURES = (
    Measure(
        name="output_error",
        question=KV,
        column="output_error",
        better=-1,
        alias="error",
        is_headline=True,
    ),
    Measure(
        name="kl_predicted_nats",
        question=KV,
        column="kl_predicted_nats",
        unit=_NATS,
        better=-1,
        alias="kl_predicted",
        is_headline=True,
    ),
    Measure(
        name="kl_nats",
        question=KV,
        column="kl_nats",
        unit=_NATS,
        better=-1,
        alias="kl",
        is_headline=True,
    ),
    Measure(name="same_top_frac", question=KV, column="same_top_frac", better=1, alias="same_top"),
    Measure(
        name="nll_change",
        question=KV,
        column="nll_pruned",
        minus="nll_full",
        unit=_NATS,
        better=-1,
        alias="ppl",
        needs_given=True,
        is_headline=True,
    ),
    Measure(name="kept_frac", question=KV, column="kept_frac", alias="kept", is_per_token=False),
    Measure(name="read_frac", question=KV, column="read_frac", alias="read", is_per_token=False),
    Measure(name="kv_bytes", question=KV, column="kv_bytes", unit="bytes", is_per_token=False),
    Measure(
        name="hit_argmax",
        question=VOCAB,
        column="hit_argmax",
        better=1,
        alias="hit",
        is_headline=True,
    ),
    Measure(name="hit_chosen", question=VOCAB, column="hit_chosen", better=1),
    Measure(
        name="neg_log_mass_nats",
        question=VOCAB,
        column="neg_log_mass_nats",
        unit=_NATS,
        better=-1,
    ),
    Measure(name="cost_frac", question=VOCAB, column="cost_frac", alias="cost", is_per_token=False),
    Measure(name="set_size_mean", question=VOCAB, column="set_size_mean", unit="tokens"),
    Measure(
        name="layer_kl_nats",
        question=LAYERS,
        column="kl_nats",
        unit=_NATS,
        better=-1,
        alias="layer_kl",
        is_headline=True,
    ),
    Measure(
        name="layer_kl_predicted_nats",
        question=LAYERS,
        column="kl_predicted_nats",
        unit=_NATS,
        better=-1,
        is_headline=True,
    ),
    Measure(
        name="layer_nll_change",
        question=LAYERS,
        column="nll_pruned",
        minus="nll_full",
        unit=_NATS,
        better=-1,
        needs_given=True,
    ),
    Measure(
        name="mean_entropy_nats",
        question=RECORDED,
        column="mean_entropy_nats",
        unit="nats",
        alias="entropy",
        is_headline=True,
    ),
    Measure(name="num_tokens", question=RECORDED, column="num_tokens", unit="tokens"),
)
"""All measures. Perplexity itself is exp of a mean: its logarithm's change is what can be paired."""


def find_measure(text: str) -> Measure:
    """Return the measure of a name or short name.

    Raises
    ------
    UsageError
        If there is none.
    """
    for one in MEASURES:
        if text in (one.name, one.alias) and text:
            return one
    raise UsageError(unknown("measure", text, [one.name for one in MEASURES]))


def of_question(question: str) -> tuple[Measure, ...]:
    """Return the measures of one table."""
    return tuple(one for one in MEASURES if one.question == question)
