"""A policy: scorer x protection x budget x schedule, and its text form."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, Frac, kept_text, parse_kept, parse_part, part_text
from tracekit.kv.budgets import Budget, Uniform
from tracekit.kv.schedule import Every, Once, Schedule, parse_anchor
from tracekit.kv.scorer import SCORERS, Preset, Scorer
from tracekit.kv.select import Protection
from tracekit.registry import unknown

if TYPE_CHECKING:
    from tracekit.kv.schedule import Spans


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which entries of a KV cache stay, and when that is decided.

    Parameters
    ----------
    name
        Name of the preset that it was made from.
    scorer
        Gives each key a number.
    protection
        Keys that stay whatever their score.
    schedule
        When decisions are made.
    kept
        Entries to keep, of the tokens seen at each decision, protected ones included, rounded
        down, at least 1; None if not said yet.
    budget
        How they are shared out over layers and heads.

    Raises
    ------
    UsageError
        If an amount is given to a policy that keeps everything.
    """

    name: str
    scorer: Scorer
    protection: Protection
    schedule: Schedule
    kept: Amount | None = None
    budget: Budget = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        if not self.scorer.evicts and self.kept != Frac(1.0):
            msg = f"{self.name} keeps everything: leave kept out."
            raise UsageError(msg)

    @property
    def text(self) -> str:
        """Canonical text, every parameter written; ``parse`` gives an equal policy back."""
        kept = {} if self.kept is None else {"kept": kept_text(self.kept)}
        return _join(self.name, kept | self._items)

    @property
    def family(self) -> str:
        """Short name, the same for all kept amounts: the name and what differs from its preset."""
        entry = PRESETS.get(self.name)
        usual = entry.scorer_items() | entry.other_items(self._scorer_items)
        return _join(self.name, {k: v for k, v in self._items.items() if usual.get(k) != v})

    @property
    def _scorer_items(self) -> dict[str, str]:
        return {one.name: str(getattr(self.scorer, one.name)) for one in fields(self.scorer)}

    @property
    def _items(self) -> dict[str, str]:
        """All parameters but ``kept``, as text, in their fixed order."""
        around = {"sinks": str(self.protection.sinks), "recent": part_text(self.protection.recent)}
        return self._scorer_items | around | self.schedule.items

    def with_kept(self, fraction: float) -> Policy:
        """Return the policy that keeps this fraction of the tokens seen.

        Raises
        ------
        UsageError
            If the fraction is outside (0, 1], or the policy keeps everything.
        """
        return replace(self, kept=Frac(fraction))

    def target_frac(self, spans: Spans) -> float | None:
        """Return the fraction asked for; of tokens, the mean over decisions of kept / seen.

        None if no amount was said, or if nothing is decided: the sequence has no eviction point, or
        no row after it (its last token never enters the cache).
        """
        point = self.schedule.point(spans)
        if self.kept is None or point is None:
            return None
        decisions = self.schedule.decisions(point, spans.num_tokens - 1)
        shares = [self.kept.share(seen) for seen in decisions]
        return sum(shares) / len(shares) if shares else None


def parse(text: str) -> Policy:
    """Return the policy that a text names: ``h2o``, ``h2o:kept=0.3,every=16``.

    Parameters
    ----------
    text
        Name of a preset, then parameters: ``kept`` (``0.3``, ``512tok``), those of the scorer,
        ``sinks``, ``recent`` (tokens, or a fraction of the budget), and ``at=context|prompt|N|F``
        or ``every=N[,from=context|prompt|N|F]``. What is left out is the preset's.

    Raises
    ------
    UsageError
        If the name or a parameter does not exist, or a value is out of range.
    """
    name, _, rest = text.partition(":")
    try:
        return _build(PRESETS.get(name), _split(rest))
    except UsageError as error:
        msg = f"policy {text!r}: {error}"
        raise UsageError(msg) from error


@dataclass(frozen=True)
class Entry:
    """A preset and the class of its scorer."""

    preset: Preset
    scorer: type[Scorer]

    def scorer_items(self) -> dict[str, str]:
        """Return the scorer's parameters as text, at their defaults."""
        return {one.name: str(one.default) for one in fields(self.scorer)}

    def other_items(self, scorer_items: dict[str, str]) -> dict[str, str]:
        """Return protection and schedule as text; ``recent`` may name a scorer's parameter."""
        preset = self.preset
        recent = scorer_items.get(preset.recent, preset.recent)
        return {"sinks": str(preset.sinks), "recent": recent} | dict(preset.schedule)


class Presets:
    """All presets, by name, gathered from the scorers that serve them."""

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._entries())

    def get(self, name: str) -> Entry:
        """Return the preset named ``name`` and its scorer's class.

        Raises
        ------
        UsageError
            If there is none; the message lists what exists and the nearest name.
        """
        entries = self._entries()
        if name not in entries:
            raise UsageError(unknown("policy", name, sorted(entries)))
        return entries[name]

    def _entries(self) -> dict[str, Entry]:
        classes = [SCORERS.get(name) for name in SCORERS.names()]
        pairs = [(preset.name, Entry(preset, cls)) for cls in classes for preset in cls.presets]
        entries = dict(pairs)
        if len(entries) < len(pairs):
            msg = f"two scorers serve presets of one name: {sorted(name for name, _ in pairs)}"
            raise ValueError(msg)
        return entries


PRESETS = Presets()

_SCHEDULE = ("at", "every", "from")


def _split(rest: str) -> dict[str, str]:
    """Return ``a=1,b=2`` as a dictionary."""
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals or name in given:
            msg = f"{part!r} is not one new parameter: write name=value, each name once."
            raise UsageError(msg)
        given[name] = value
    return given


def _join(name: str, items: dict[str, str]) -> str:
    parts = ",".join(f"{key}={value}" for key, value in items.items())
    return f"{name}:{parts}" if parts else name


def _build(entry: Entry, given: dict[str, str]) -> Policy:
    """Return the policy of a preset with some parameters given as text."""
    scorer_items = entry.scorer_items()
    known = ["kept", *scorer_items, "sinks", "recent", *_SCHEDULE]
    for name in given:
        if name not in known:
            raise UsageError(unknown("parameter", name, known))
    scorer_items = {name: given.get(name, value) for name, value in scorer_items.items()}
    items = entry.other_items(scorer_items)
    hints = get_type_hints(entry.scorer)
    kept = given.get("kept", None if entry.scorer.evicts else "1.0")
    return Policy(
        name=entry.preset.name,
        scorer=entry.scorer(
            **{name: _value(name, hints[name], text) for name, text in scorer_items.items()}
        ),
        protection=Protection(
            sinks=_value("sinks", int, given.get("sinks", items["sinks"])),
            recent=parse_part(given.get("recent", items["recent"])),
        ),
        schedule=_schedule({k: v for k, v in items.items() if k in _SCHEDULE}, given),
        kept=None if kept is None else parse_kept(kept),
    )


def _schedule(usual: dict[str, str], given: dict[str, str]) -> Schedule:
    """Return the schedule given, where none is the preset's."""
    if "every" in given:
        usual = {"from": "prompt"}
    if "at" in given:
        usual = {}
    items = usual | {name: given[name] for name in _SCHEDULE if name in given}
    if items.keys() == {"at"}:
        return Once(parse_anchor(items["at"]))
    if items.keys() == {"every", "from"}:
        return Every(parse_anchor(items["from"]), _value("every", int, items["every"]))
    msg = "at=POINT decides once, every=N with from=POINT again and again: name one of the two."
    raise UsageError(msg)


def _value(name: str, hint: Any, text: str) -> Any:
    """Return a parameter's value of its annotated type."""
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise UsageError(unknown(name, text, list(get_args(hint))))
        return text
    try:
        return hint(text)
    except ValueError as error:
        msg = f"{name}={text!r} is no {hint.__name__}."
        raise UsageError(msg) from error
