"""Reads the text of a policy: ``h2o``, ``h2o:kept=0.3,every=16``, ``snapkv:kept=0.5+int4``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal, get_args, get_type_hints

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, parse_kept, parse_part
from tracekit.kv.attached import attached_as, attached_names
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS
from tracekit.kv.policy import Policy
from tracekit.kv.presets import PRESETS, Entry
from tracekit.kv.schedule import Schedule, parse_schedule
from tracekit.kv.select import Protection
from tracekit.kv.text import NEUTRAL
from tracekit.parameters import parse_value, split
from tracekit.registry import unknown

_PROTECTION = ("sinks", "recent", "grace", "template")
_SCHEDULE = ("at", "every", "from", "above", "evict-prompt")


def parse(text: str) -> Policy:
    """Return the policy that a text names.

    Parameters
    ----------
    text
        Name of a preset, then parameters: ``kept`` (``0.3``, ``512tok``, ``64MiB``), those of the
        scorer, ``sinks``, ``recent`` (tokens, or a fraction of the budget), ``grace``,
        ``template=kept``, ``layers`` and ``heads`` with the parameters of these budgets,
        ``at=context|prompt|turn|N|F`` or ``every=N[,from=POINT][,above=N]``, ``evict-prompt=CHUNK``
        and ``positions=cache``. What is left out is the preset's. Then, each after a ``+``, what it is
        stacked with: ``+int4``, ``+quest:read=0.1``. A text of such parts alone keeps everything.

    Raises
    ------
    UsageError
        If the name or a parameter does not exist, or a value is out of range.
    """
    first, *rest = text.split("+")
    name = first.partition(":")[0]
    if name in attached_names():
        first, rest = "full", [first, *rest]
    try:
        name, _, items = first.partition(":")
        _refuse_name(name)
        return _build(PRESETS.get(name), split(items), rest)
    except UsageError as error:
        msg = f"policy {text!r}: {error}"
        raise UsageError(msg) from error


def _refuse_name(name: str) -> None:
    """Raise if there is no such policy, nor a part that would stand alone."""
    if not name:
        msg = "a name is missing: write one such as h2o, or a part alone such as int4."
        raise UsageError(msg)
    if name not in PRESETS.names():
        raise UsageError(unknown("policy", name, [*PRESETS.names(), *attached_names()]))


def _build(entry: Entry, given: dict[str, str], attached: list[str]) -> Policy:
    """Return the policy of a preset with some parameters given as text."""
    own = {one.name for one in fields(entry.scorer)}
    items = NEUTRAL | entry.items({name: given[name] for name in own if name in given})
    choice = {name: given.get(name, items[name]) for name in ("layers", "heads")}
    budgets: dict[str, Any] = {"layers": LAYER_BUDGETS.get(choice["layers"])}
    budgets |= {"heads": HEAD_BUDGETS.get(choice["heads"])}
    shared = {one.name for cls in budgets.values() for one in fields(cls)}
    known = ["kept", *own, *_PROTECTION, "layers", "heads", *shared, *_SCHEDULE, "positions"]
    _refuse_unknown(given, known)
    values = {name: value for name, value in items.items() if name not in _SCHEDULE} | given
    kept = given.get("kept", None if entry.scorer.evicts else "1.0")
    parts: dict[str, Any] = {name: _make(cls, values) for name, cls in budgets.items()}
    for text in attached:
        field, part = _attachment(text)
        if field in parts:
            msg = f"{text!r} is a second {field}; one is enough."
            raise UsageError(msg)
        parts[field] = part
    return Policy(
        name=entry.preset.name,
        scorer=_make(entry.scorer, values),
        protection=_make(Protection, values),
        schedule=_schedule({k: v for k, v in items.items() if k in _SCHEDULE}, given),
        kept=None if kept is None else parse_kept(kept),
        positions=_value("positions", Literal["original", "cache"], values["positions"]),
        **parts,
    )


def _attachment(text: str) -> tuple[str, Any]:
    """Return the field of a policy and the part that goes there, of a text after a ``+``."""
    name, _, rest = text.partition(":")
    attached, given = attached_as(name), split(rest)
    _refuse_unknown(given, [one.name for one in fields(attached.part)])
    return attached.field, _make(attached.part, given)


def _refuse_unknown(given: dict[str, str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise UsageError(unknown("parameter", name, known))


def _make(cls: Any, values: dict[str, str]) -> Any:
    """Return an instance of a part's class with the parameters that are its own."""
    hints, names = get_type_hints(cls), [one.name for one in fields(cls)]
    return cls(
        **{name: _value(name, hints[name], values[name]) for name in names if name in values}
    )


def _schedule(usual: dict[str, str], given: dict[str, str]) -> Schedule:
    """Return the schedule given, where none is the preset's."""
    if "every" in given:
        usual = {"from": "prompt"}
    if "at" in given:
        usual = {}
    return parse_schedule(usual | {name: given[name] for name in _SCHEDULE if name in given})


def _value(name: str, hint: Any, text: str) -> Any:
    """Return a parameter's value of its annotated type."""
    if Amount in (hint, *get_args(hint)):
        return parse_part(text) if name == "recent" else parse_kept(text)
    return parse_value(name, hint, text)
