"""Policies and schemes by their text: chosen by a part of it, and shown as short as tells them apart.

Texts are compared as texts: canonical ones name all that a policy is, and engines need torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

AGAINST = " against "
"""Between the two texts of a pair of policies; such names are short as they are."""

_FIT = " fit="
"""Before how sizes were fitted that no decoder has: meant only by a text that says so."""

_ALWAYS = "kept"
"""The parameter that is shown even where all have the same."""


@dataclass(frozen=True)
class _Part:
    """A name with its parameters, and the sign before it: ``+``, ``@`` or nothing."""

    sign: str
    head: str
    parameters: tuple[str, ...]


def _parts(text: str) -> tuple[_Part, ...]:
    pieces = re.split(r"([+@])", text)
    found = []
    for sign, piece in zip(["", *pieces[1::2]], pieces[::2], strict=True):
        head, _, parameters = piece.partition(":")
        found.append(_Part(sign, head, tuple(filter(None, parameters.split(",")))))
    return tuple(found)


@dataclass(frozen=True)
class Selector:
    """Which policies, schemes or rules a text means: those that have all that it says.

    ``snapkv`` is SnapKV at every kept fraction and with any parameters, ``snapkv:kept=0.25`` at one;
    what a policy is stacked with must be named. A number after a last colon is the size of a set
    or the number of a layer: ``previous:1024``.
    """

    text: str

    @property
    def place(self) -> int | None:
        """The size or layer, if there is one."""
        found = re.search(r":(\d+)$", self.text)
        return int(found[1]) if found else None

    @property
    def name(self) -> str:
        """The text without a size or layer."""
        return re.sub(r":\d+$", "", self.text)

    def takes(self, name: str, place: int) -> bool:
        """Whether this text means a policy, scheme or rule at a size or layer."""
        if self.place not in (None, place) or (_FIT in name) != (_FIT in self.text):
            return False
        if name == self.name:
            return True
        asked, there = _parts(self.name), _parts(name)
        return len(asked) == len(there) and all(
            (one.sign, one.head) == (other.sign, other.head)
            and set(one.parameters) <= set(other.parameters)
            for one, other in zip(asked, there, strict=True)
        )


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return by canonical text a shorter one that no other of these texts shares.

    Parameters that all texts of the same parts have alike are left out, the kept fraction is not.
    """
    unique = sorted(set(names))
    split = {name: _parts(name) for name in unique if AGAINST not in name}
    alike: dict[tuple[tuple[str, str], ...], list[tuple[_Part, ...]]] = {}
    for parts in split.values():
        alike.setdefault(_skeleton(parts), []).append(parts)
    pairs = {name: name for name in unique if AGAINST in name}
    return pairs | {name: _short(parts, alike[_skeleton(parts)]) for name, parts in split.items()}


def _skeleton(parts: tuple[_Part, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((one.sign, one.head) for one in parts)


def _short(parts: tuple[_Part, ...], alike: list[tuple[_Part, ...]]) -> str:
    written = []
    for place, part in enumerate(parts):
        shared = set.intersection(*(set(other[place].parameters) for other in alike))
        told = [
            one
            for one in part.parameters
            if one not in shared or (one.partition("=")[0] == _ALWAYS and place == 0)
        ]
        written.append(part.sign + part.head + (":" if told else "") + ",".join(told))
    return "".join(written)
