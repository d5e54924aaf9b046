"""Layers as text: what is named, and what is refused."""

from __future__ import annotations

import pytest

from tracekit.errors import UsageError
from tracekit.vocab.layers import LayerChoice


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("all", range(6)),
        ("0", [0]),
        ("5", [5]),
        ("1-3", [1, 2, 3]),
        ("4-4", [4]),
        ("last1", [5]),
        ("last4", [2, 3, 4, 5]),
        ("last6", range(6)),
        ("last60", range(6)),
        ("5/0-1", [0, 1, 5]),
        ("4.1/2.0/4.0", [2, 4]),
    ],
)
def test_a_text_names_layers_of_a_model_of_six(text: str, wanted: list[int]) -> None:
    choice = LayerChoice.parse(text)
    assert choice.numbers(6) == tuple(wanted)
    assert str(choice) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some",
        "--1",
        "1-",
        "1-2-3",
        "last",
        "last0",
        "last-1",
        "1,2",
        "1.",
        "1.2.3",
        "1/",
        "999999",
    ],
)
def test_a_text_that_names_none_says_how_to_write_them(text: str) -> None:
    with pytest.raises(UsageError, match="write all, 12, 8-15 or last4"):
        LayerChoice.parse(text)


@pytest.mark.parametrize("text", ["6", "2-6", "9-9"])
def test_layers_that_the_model_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"layers={text}: the model has layers 0 to 5"):
        LayerChoice.parse(text).numbers(6)


def test_heads_are_those_named_or_all_of_a_layer() -> None:
    choice = LayerChoice.parse("4.1/2.0/4.0/1")
    found = {layer: choice.heads(layer, 6, 3) for layer in choice.numbers(6)}
    assert found == {1: (0, 1, 2), 2: (0,), 4: (0, 1)}


def test_a_head_that_the_layer_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"layers=4.3: layer 4 has heads 0 to 2"):
        LayerChoice.parse("4.3").heads(4, 6, 3)


def test_the_last_layer_has_a_short_name_and_a_range_goes_up() -> None:
    assert LayerChoice.parse("-1").numbers(6) == (5,)
    with pytest.raises(UsageError, match="write the lower number first"):
        LayerChoice.parse("3-1").numbers(6)
