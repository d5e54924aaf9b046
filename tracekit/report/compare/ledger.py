"""The ledger of a comparison: model, tokenizer, versions, recording and plan of both sides."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_PACKAGES = ("tracekit", "torch", "transformers", "numpy", "pyarrow")

_PLAN = ("kv_bytes", "convention", "sizes", "levels", "probe_block", "calibrate", "bandwidths")
"""Settings of a replay that its numbers depend on; what was replayed is listed apart."""

MODEL, TOKENIZER = "model", "tokenizer"


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Parameters
    ----------
    group
        What it is of: model, tokenizer, recording, replay.
    what
        Its name.
    a, b
        What both sides say; None where one does not.
    """

    group: str
    what: str
    a: str | None
    b: str | None

    @property
    def status(self) -> str:
        """Same, changed, or not recorded."""
        if self.a is None or self.b is None:
            return "not recorded"
        return "same" if self.a == self.b else "changed"


def ledger(run_a: dict[str, Any], run_b: dict[str, Any]) -> tuple[Entry, ...]:
    """Return what two runs say in ``run.json``; that neither names its tokenizer is told too."""
    sides = [_facts(run_a), _facts(run_b)]
    entries = (Entry(*name, sides[0][name], sides[1][name]) for name in sides[0])
    return tuple(one for one in entries if one.a or one.b or one.group == TOKENIZER)


def _facts(run: dict[str, Any]) -> dict[tuple[str, str], str | None]:
    """Return what is known of a run, by group and name."""
    trace, plan = run["trace"], run["plan"]
    spec, recorded = trace.get("spec", {}), trace.get("versions", {})
    facts: dict[tuple[str, str], Any] = {
        (MODEL, one): spec.get(one) for one in ("name", "revision", "fingerprint", "dtype")
    }
    facts[TOKENIZER, "hash"] = trace.get("tokenizer", {}).get("sha256")
    facts[TOKENIZER, "vocabulary"] = spec.get("num_tokens")
    facts |= {("recording", one): recorded.get(one) for one in _PACKAGES}
    facts |= {("recording", one): trace.get(one) for one in ("run_id", "capture", "sampler")}
    facts["recording", "device"] = trace.get("host", {}).get("device")
    facts["recording", "sequences"] = len(run["sequences"])
    facts |= {("replay", one): run["versions"].get(one) for one in _PACKAGES}
    facts["replay", "tracekit"] = run["tracekit_version"]
    facts["replay", "schema"] = run["schema_version"]
    facts["replay", "seed"] = run["seed"]
    facts |= {("replay", one): plan.get(one) for one in _PLAN}
    return {name: _text(value) for name, value in facts.items()}


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def tokenizers_differ(run_a: dict[str, Any], run_b: dict[str, Any]) -> bool:
    """Whether the tokenizers are known to be two: by hash, else by the size of the vocabulary."""
    entries = {one.what: one for one in ledger(run_a, run_b) if one.group == TOKENIZER}
    if entries["hash"].status != "not recorded":
        return entries["hash"].status == "changed"
    return entries["vocabulary"].status == "changed"


def what_changed(entries: tuple[Entry, ...]) -> str:
    """Return in a sentence what is the same and what changed."""
    parts = [_of_group(entries, MODEL), _of_group(entries, TOKENIZER)]
    for group in ("recording", "replay"):
        changed = [one for one in entries if one.group == group and one.status == "changed"]
        parts.append(f"{group}: {_told(changed)}" if changed else f"the same {group}")
    return "; ".join(parts) + "."


def _told(changed: list[Entry]) -> str:
    return ", ".join(f"{one.what} {brief(one.a)} -> {brief(one.b)}" for one in changed)


def _of_group(entries: tuple[Entry, ...], group: str) -> str:
    """Return whether model or tokenizer is the same, by what names it surely."""
    sure = {MODEL: "fingerprint", TOKENIZER: "hash"}[group]
    own = {one.what: one for one in entries if one.group == group}
    if own[sure].status == "not recorded" and group == TOKENIZER:
        size = own["vocabulary"]
        known = f"its vocabulary is {'the same size' if size.status == 'same' else size.status}"
        return f"the {group} is not recorded on both sides ({known})"
    changed = [one for one in own.values() if one.status == "changed"]
    if not changed:
        unsure = " (by name alone)" if own[sure].status == "not recorded" else ""
        return f"the same {group}{unsure}"
    return f"another {group} ({_told(changed)})"


def brief(text: str | None) -> str:
    """Return the start of a hash, other texts as they are, '-' for none."""
    if text is None:
        return "-"
    is_hash = len(text) >= 32 and set(text) <= set("0123456789abcdef")
    return f"{text[:8]}..." if is_hash else text
