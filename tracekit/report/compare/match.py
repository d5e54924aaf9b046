"""Which sequences of two sides are of the same prompt, and which of the same text, as far as is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracekit.errors import InputError, TracekitError
from tracekit.report.compare.ledger import tokenizers_differ
from tracekit.report.compare.side import read_columns
from tracekit.schema import SCORED
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from tracekit.report.compare.side import Side

GIVEN = "given"


@dataclass(frozen=True)
class Agreement:
    """Whether prompt and tokens of a sequence are the same on both sides; None: not known."""

    prompt: bool | None
    text: bool | None


@dataclass(frozen=True, kw_only=True)
class Match:
    """Sequences of two sides, by id.

    Parameters
    ----------
    paired
        On both sides, and of the same prompt or given text as far as is known; in A's order.
    only_a, only_b
        On one side only.
    mismatched
        On both sides under one id, but of another prompt or given text: not compared.
    other_text, unknown_text
        Of the paired: those whose generated text is another, and those of which it is not known.
    same_given
        Of the paired: those whose text was given and is known to be the same.
    how
        What the sides were compared by.
    """

    paired: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    mismatched: tuple[str, ...]
    other_text: frozenset[str]
    unknown_text: frozenset[str]
    same_given: frozenset[str]
    how: str


def match_sequences(a: Side, b: Side) -> Match:
    """Return which sequences can be held against each other.

    Raises
    ------
    InputError
        If none can.
    """
    common = [name for name in a.sequences if name in b.sequences]
    how, known = _agreements(a, b, common)
    paired = tuple(name for name in common if _is_paired(name, a, b, known[name]))
    mismatched = tuple(name for name in common if name not in set(paired))
    if not paired:
        why = "another prompt" if common else "no id in common"
        msg = (
            f"{a.folder} and {b.folder} have no sequence to compare ({why}): record the same "
            "prompts for both."
        )
        raise InputError(msg)
    text = {name: known[name].text for name in paired}
    same = (name for name in paired if text[name] and a.sequences[name]["text_source"] == GIVEN)
    return Match(
        paired=paired,
        only_a=tuple(name for name in a.sequences if name not in b.sequences),
        only_b=tuple(name for name in b.sequences if name not in a.sequences),
        mismatched=mismatched,
        other_text=frozenset(name for name in paired if text[name] is False),
        unknown_text=frozenset(name for name in paired if text[name] is None),
        same_given=frozenset(same),
        how=how,
    )


def _is_paired(name: str, a: Side, b: Side, known: Agreement) -> bool:
    """Whether a sequence of both sides asks the same of both models."""
    sources = {side.sequences[name]["text_source"] for side in (a, b)}
    if len(sources) > 1 or known.prompt is False:
        return False
    # Another tokenizer cuts a given text into other tokens; then they say nothing of the text.
    return not (sources == {GIVEN} and known.text is False and not tokenizers_differ(a.run, b.run))


def _agreements(a: Side, b: Side, common: list[str]) -> tuple[str, dict[str, Agreement]]:
    """Return what was compared, and by sequence what came out."""
    run_ids = [side.run["trace"].get("run_id") for side in (a, b)]
    if run_ids[0] is not None and run_ids[0] == run_ids[1]:
        return "both are of one recording", dict.fromkeys(common, Agreement(True, True))
    texts = [_recorded_texts(side) for side in (a, b)]
    if texts[0] and texts[1]:
        found = {name: _of_texts(texts[0][name], texts[1][name]) for name in common}
        return "texts of prompts and token ids, read from both traces", found
    tokens = [_scored_tokens(side) for side in (a, b)]
    found = {
        name: _of_lengths(
            a.sequences[name],
            b.sequences[name],
            None if tokenizers_differ(a.run, b.run) else [one.get(name) for one in tokens],
        )
        for name in common
    }
    return "lengths and token ids of scored steps: a trace is not where it was", found


def _recorded_texts(side: Side) -> dict[str, tuple[str | None, bytes]] | None:
    """Return prompt and token ids by sequence, if the trace is still where it was."""
    path = str(side.run["trace"].get("path"))
    if not (Path(path) / "trace.json").is_file():
        return None
    try:
        trace = Trace(path)
        if trace.manifest.get("run_id") != side.run["trace"].get("run_id"):
            return None
        tokens = trace.table("tokens", columns=["sequence_id", "position", "token_id"])
        prompts = trace.sequences.set_index("sequence_id")["prompt_text"].to_dict()
    except TracekitError:
        return None  # said: the sides are then told apart by their lengths
    ids = tokens["token_id"].groupby(tokens["sequence_id"].astype(str)).agg(_bytes).to_dict()
    found = {name: (prompts.get(name), ids.get(name, b"")) for name in side.sequences}
    return found if set(side.sequences) <= set(prompts) else None


def _bytes(values: Any) -> bytes:
    return bytes(values.to_numpy(dtype="<i8").tobytes())


def _of_texts(a: tuple[str | None, bytes], b: tuple[str | None, bytes]) -> Agreement:
    is_known = isinstance(a[0], str) and isinstance(b[0], str)
    return Agreement(a[0] == b[0] if is_known else None, a[1] == b[1])


def _scored_tokens(side: Side) -> dict[str, bytes]:
    """Return position and token id of scored steps, by sequence; none where no set was tried."""
    rows = read_columns(side.folder, SCORED, ["sequence_id", "position", "token_id"])
    rows = rows.sort_values(["sequence_id", "position"])
    pairs = rows["position"].astype("int64") * 2**32 + rows["token_id"].astype("int64")
    by_sequence = pairs.groupby(rows["sequence_id"]).agg(_bytes)
    return {str(name): tokens for name, tokens in by_sequence.items()}


def _of_lengths(
    a: dict[str, Any], b: dict[str, Any], tokens: list[bytes | None] | None
) -> Agreement:
    """Return what lengths and scored tokens tell; nothing where tokenizers differ (None)."""
    if tokens is None:
        return Agreement(None, False)
    if any(a[name] != b[name] for name in ("prompt_end", "context_end")):
        return Agreement(False, None)
    if a["num_tokens"] != b["num_tokens"]:
        return Agreement(None, False)
    if None in tokens:
        return Agreement(None, None)
    return Agreement(None, tokens[0] == tokens[1])
