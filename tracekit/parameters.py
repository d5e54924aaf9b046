"""Parameters of named parts as text: ``a=1,b=0.5`` and back, by the fields of a dataclass."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from tracekit.errors import UsageError
from tracekit.registry import unknown

LARGEST = 2**28 - 1
"""Largest number that a parameter takes."""


def split(text: str) -> dict[str, str]:
    """Return ``a=1,b=2`` as a dictionary.

    Raises
    ------
    UsageError
        If a part is no ``name=value``, or a name comes twice.
    """
    given: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or name in given:
            msg = f"{part!r} is not one new parameter: write name=value, each name once."
            raise UsageError(msg)
        given[name] = value
    return given


def make(cls: Any, given: dict[str, str]) -> Any:
    """Return an instance of a dataclass with parameters given as text.

    Raises
    ------
    UsageError
        If a parameter does not exist, or its value is none of its type.
    """
    hints, names = get_type_hints(cls), [one.name for one in fields(cls)]
    for name in given:
        if name not in names:
            raise UsageError(unknown("parameter", name, names or ["none"]))
    return cls(**{name: parse_value(name, hints[name], text) for name, text in given.items()})


def parse_value(name: str, hint: Any, text: str) -> Any:
    """Return a parameter's value of its annotated type.

    Parameters
    ----------
    name
        Of the parameter.
    hint
        ``Literal``, a type that is made of text (``int``, ``float``), or one with ``parse``.
    text
        What was given.

    Raises
    ------
    UsageError
        If the text is no such value.
    """
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise UsageError(unknown(name, text, list(get_args(hint))))
        return text
    if hasattr(hint, "parse"):
        return hint.parse(text)
    try:
        value = hint(text)
    except ValueError as error:
        msg = f"{name}={text!r} is no {hint.__name__}."
        raise UsageError(msg) from error
    if hint in (int, float) and not abs(value) <= LARGEST:
        msg = f"{name}={text} is no number that can be used: at most {LARGEST}."
        raise UsageError(msg)
    return value


def check_numbers(part: Any, text: str, least: int = 1) -> None:
    """Refuse parameters that are no sizes or weights.

    Parameters
    ----------
    part
        A dataclass instance.
    text
        What it is called in the message.
    least
        Of whole numbers.

    Raises
    ------
    UsageError
        If a whole number is below ``least``, or another number below 0 or not finite.
    """
    for name, hint in get_type_hints(type(part)).items():
        if hint is int and getattr(part, name) < least:
            msg = f"{text}: {name} must be at least {least}."
            raise UsageError(msg)
        if hint is float and not 0 <= getattr(part, name) < math.inf:
            msg = f"{text}: {name} is a number from 0 on."
            raise UsageError(msg)


def text_of(part: Any) -> str:
    """Return the parameters of a dataclass instance as text, in the order of its fields."""
    return _text([(one.name, getattr(part, one.name)) for one in fields(part)])


def short_text_of(part: Any) -> str:
    """Return the same with those alone that are not what they are by default."""
    pairs = [(one, getattr(part, one.name)) for one in fields(part)]
    return _text([(one.name, value) for one, value in pairs if value != one.default])


class Named:
    """Base of frozen dataclasses that a text names with their parameters."""

    name: ClassVar[str]

    @property
    def text(self) -> str:
        """Canonical text, the identity: ``lowrank:rank=64``."""
        return _named(self.name, text_of(self))

    @property
    def short(self) -> str:
        """Text without what is so by default."""
        return _named(self.name, short_text_of(self))


def _named(name: str, parameters: str) -> str:
    return f"{name}:{parameters}" if parameters else name


def _text(pairs: list[tuple[str, Any]]) -> str:
    return ",".join(
        f"{name}={_number(value) if type(value) is float else value}" for name, value in pairs
    )


def _number(value: float) -> str:
    """Return the number as short as it can be read back; -0 is 0, which it equals."""
    value += 0.0
    short = f"{value:g}"
    text = short if float(short) == value else repr(value)
    # A plus would join two estimators.
    return text.replace("e+", "e")
