"""Published policies as rows of a table: a scorer and what goes with it by default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS
from tracekit.kv.scorer import SCORERS, Preset, Scorer
from tracekit.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Entry:
    """A preset and the class of its scorer."""

    preset: Preset
    scorer: type[Scorer]

    def items(self, scorer_items: dict[str, str] | None = None) -> dict[str, str]:
        """Return all parameters as text; ``recent`` may name a parameter of the scorer.

        Parameters
        ----------
        scorer_items
            Parameters of the scorer as given; None: the defaults.
        """
        preset, own = self.preset, dict(self.preset.items)
        defaults = {one.name: str(one.default) for one in fields(self.scorer)}
        items = defaults | own | (scorer_items or {})
        around = {"sinks": str(preset.sinks), "recent": items.get(preset.recent, preset.recent)}
        return items | around | dict(preset.schedule)


class Presets:
    """All presets by name, gathered from the scorers and budgets that serve them."""

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
        pairs = [(entry.preset.name, entry) for entry in _all()]
        entries = dict(pairs)
        if len(entries) < len(pairs):
            msg = f"two presets have one name: {sorted(name for name, _ in pairs)}"
            raise ValueError(msg)
        return entries


def _all() -> Iterator[Entry]:
    for name in SCORERS.names():
        scorer = SCORERS.get(name)
        for preset in scorer.presets:
            yield Entry(preset, scorer)
    budgets = [LAYER_BUDGETS.get(name).presets for name in LAYER_BUDGETS.names()]
    budgets += [HEAD_BUDGETS.get(name).presets for name in HEAD_BUDGETS.names()]
    for presets in budgets:
        for preset in presets:
            yield Entry(preset, SCORERS.get(preset.scorer))


PRESETS = Presets()
