"""Parameters as text and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import UsageError
from tracekit.parameters import LARGEST, make, split, text_of
from tracekit.vocab.layers import LayerChoice

Shape = Literal["round", "square"]


@dataclass(frozen=True)
class Part:
    size: int = 3
    share: float = 0.5
    shape: Shape = "round"
    layers: LayerChoice = LayerChoice.parse("all")  # noqa: RUF009


@dataclass(frozen=True)
class Plain:
    """No parameters."""


NUMBERS = st.floats(-LARGEST, LARGEST, allow_nan=False)


@given(
    st.integers(-LARGEST, LARGEST),
    NUMBERS,
    st.sampled_from(["round", "square"]),
    st.sampled_from(["all", "3", "0-2", "last4"]),
)
def test_what_is_written_reads_back_as_it_was(
    size: int, share: float, shape: Shape, layers: str
) -> None:
    part = Part(size, share, shape, LayerChoice.parse(layers))
    assert make(Part, split(text_of(part))) == part


@given(NUMBERS, NUMBERS)
def test_different_numbers_have_different_texts(one: float, other: float) -> None:
    assert (text_of(Part(share=one)) == text_of(Part(share=other))) == (one == other)


@pytest.mark.parametrize(
    ("value", "text"),
    [(4.0, "4"), (0.5, "0.5"), (0.1234567, "0.1234567"), (1e-9, "1e-09"), (1 / 3, repr(1 / 3))],
)
def test_numbers_are_as_short_as_can_be_read_back(value: float, text: str) -> None:
    assert text_of(Part(share=value)) == f"size=3,share={text},shape=round,layers=all"


def test_no_parameters_are_no_text() -> None:
    assert text_of(Plain()) == ""
    assert make(Plain, split("")) == Plain()


def test_what_is_not_given_keeps_its_default() -> None:
    assert make(Part, split(" size = 7 , shape=square")) == Part(size=7, shape="square")
    assert split("a=1,b=2") == {"a": "1", "b": "2"}
    assert split("a=1,,") == {"a": "1"}


@pytest.mark.parametrize("text", ["size", "size=1,size=2", "size=1,share", "a b"])
def test_what_is_no_new_parameter_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="is not one new parameter: write name=value"):
        split(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sise=3", "unknown parameter 'sise'; did you mean 'size'"),
        ("size=many", "size='many' is no int"),
        ("size=1.5", "size='1.5' is no int"),
        ("size=", "size='' is no int"),
        (f"size={LARGEST + 1}", "is no number that can be used"),
        ("size=-999999999", "is no number that can be used"),
        ("share=x", "share='x' is no float"),
        ("share=nan", "share=nan is no number that can be used"),
        ("share=inf", "share=inf is no number that can be used"),
        ("share=1e30", "share=1e30 is no number that can be used"),
        ("shape=circle", "unknown shape 'circle'"),
        ("layers=some", "layers=some names no layers"),
    ],
)
def test_a_value_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(Part, split(text))


def test_a_part_without_parameters_says_that_it_has_none() -> None:
    with pytest.raises(UsageError, match="unknown parameter 'size'"):
        make(Plain, split("size=3"))
