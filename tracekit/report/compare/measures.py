"""What two sets of results are compared by: each measure, its unit, and which way is better."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from tracekit.errors import UsageError
from tracekit.registry import unknown

KV, VOCAB, LAYERS, RECORDED = "kv", "vocab", "layers", "recorded"
"""Questions that have measures; ``recorded`` is what the trace itself says of its sequences."""


@dataclass(frozen=True)
class Measure:
    """One measure of a policy, candidate set, layer or recording on a sequence.

    Parameters
    ----------
    name
        What it is called here.
    question
        Table that it is of.
    unit
        Empty for a share.
    columns
        Columns of that table: one, or two of which the second is taken off the first; none: the
        one of its name.
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
    unit: str = ""
    _: KW_ONLY
    columns: tuple[str, ...] = ()
    better: int = 0
    alias: str = ""
    is_per_token: bool = True
    needs_given: bool = False
    is_headline: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Columns that it is made of."""
        return self.columns or (self.name,)


_NATS = "nats a token"
_CHANGE = ("nll_pruned", "nll_full")

MEASURES = (
    Measure("output_error", KV, better=-1, alias="error", is_headline=True),
    Measure("kl_predicted_nats", KV, _NATS, better=-1, alias="kl_predicted", is_headline=True),
    Measure("kl_nats", KV, _NATS, better=-1, alias="kl", is_headline=True),
    Measure("same_top_frac", KV, better=1, alias="same_top"),
    Measure(
        "nll_change",
        KV,
        _NATS,
        columns=_CHANGE,
        better=-1,
        alias="ppl",
        needs_given=True,
        is_headline=True,
    ),
    Measure("kept_frac", KV, alias="kept", is_per_token=False),
    Measure("read_frac", KV, alias="read", is_per_token=False),
    Measure("kv_bytes", KV, "bytes", is_per_token=False),
    Measure("hit_argmax", VOCAB, better=1, alias="hit", is_headline=True),
    Measure("hit_chosen", VOCAB, better=1),
    Measure("neg_log_mass_nats", VOCAB, _NATS, better=-1),
    Measure("cost_frac", VOCAB, alias="cost", is_per_token=False),
    Measure("set_size_mean", VOCAB, "tokens"),
    Measure(
        "layer_kl_nats",
        LAYERS,
        _NATS,
        columns=("kl_nats",),
        better=-1,
        alias="layer_kl",
        is_headline=True,
    ),
    Measure(
        "layer_kl_predicted_nats",
        LAYERS,
        _NATS,
        columns=("kl_predicted_nats",),
        better=-1,
        is_headline=True,
    ),
    Measure("layer_nll_change", LAYERS, _NATS, columns=_CHANGE, better=-1, needs_given=True),
    Measure("mean_entropy_nats", RECORDED, "nats", alias="entropy", is_headline=True),
    Measure("num_tokens", RECORDED, "tokens"),
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
