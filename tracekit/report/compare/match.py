"""Which sequences of two sides are of the same prompt, and which of the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.errors import InputError
from tracekit.report.compare.ledger import tokenizers_differ

if TYPE_CHECKING:
    from tracekit.report.compare.side import Side

_GIVEN = "given"


@dataclass(frozen=True, kw_only=True)
class Match:
    """Sequences of two sides, by id, told apart by the hashes of their prompts and token ids.

    Parameters
    ----------
    paired
        On both sides, and of the same prompt, given text the same too; in A's order.
    only_a, only_b
        On one side only.
    mismatched
        On both sides under one id, but of another prompt or given text: not compared.
    other_text
        Of the paired: those of which each side has other tokens.
    same_given
        Of the paired: those whose text was given, and is of the same tokens.
    """

    paired: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    mismatched: tuple[str, ...]
    other_text: frozenset[str]
    same_given: frozenset[str]


def match_sequences(a: Side, b: Side) -> Match:
    """Return which sequences can be held against each other.

    Another tokenizer cuts a text into other tokens and has another chat template, so that neither
    says whether the prompt is the same: such sequences are paired by their ids alone.

    Raises
    ------
    InputError
        If none can.
    """
    common = [name for name in a.sequences if name in b.sequences]

    def alike(what: str) -> set[str]:
        return {name for name in common if a.sequences[name][what] == b.sequences[name][what]}

    same_text = alike("tokens_sha256")
    given = {name for name in common if a.sequences[name]["text_source"] == _GIVEN}
    can_tell = not tokenizers_differ(a.run, b.run)
    pairs = alike("text_source")
    if can_tell:
        pairs &= alike("prompt_sha256") - (given - same_text)
    if not pairs:
        why = "another prompt, as the models read it" if common else "no id in common"
        msg = (
            f"{a.folder} and {b.folder} have no sequence to compare ({why}): record the same "
            "prompts for both."
        )
        raise InputError(msg)
    return Match(
        paired=tuple(name for name in common if name in pairs),
        only_a=tuple(name for name in a.sequences if name not in b.sequences),
        only_b=tuple(name for name in b.sequences if name not in a.sequences),
        mismatched=tuple(name for name in common if name not in pairs),
        other_text=frozenset(pairs - same_text),
        same_given=frozenset(pairs & given & same_text),
    )
