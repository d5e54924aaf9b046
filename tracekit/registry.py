"""Registries of classes, filled by decorators, looked up by name.

The modules of the registry's own package and third parties' entry points are imported at the first
look-up, so that a new scorer or estimator is one new file and nothing else.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Generic, TypeVar

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one kind by name.

    Parameters
    ----------
    kind
        What the entries are, for messages: ``"scorer"``.
    package
        Package whose modules register themselves when imported.
    group
        Entry-point group through which third parties add theirs.
    """

    def __init__(self, kind: str, *, package: str, group: str) -> None:
        self.kind = kind
        self._package = package
        self._group = group
        self._classes: dict[str, type[T]] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Return the decorator that enters a class under ``name``; a name is taken once."""

        def enter(cls: type[T]) -> type[T]:
            if self._classes.get(name, cls) is not cls:
                msg = f"two {self.kind}s are named {name!r}: {self._classes[name]} and {cls}"
                raise ValueError(msg)
            self._classes[name] = cls
            return cls

        return enter

    def names(self) -> list[str]:
        """Return all names, sorted."""
        self._load()
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """Return the class named ``name``.

        Raises
        ------
        UsageError
            If there is none; the message lists what exists and the nearest name.
        """
        self._load()
        if name not in self._classes:
            raise UsageError(unknown(self.kind, name, self.names()))
        return self._classes[name]

    def name_of(self, cls: type[T]) -> str:
        """Return the name under which a class is registered.

        Raises
        ------
        ValueError
            If it is not.
        """
        self._load()
        for name, known in self._classes.items():
            if known is cls:
                return name
        msg = f"{cls} is not registered as a {self.kind}"
        raise ValueError(msg)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        for entry in entry_points(group=self._group):
            entry.load()


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Return the sentence for a name that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}."
