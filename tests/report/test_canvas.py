from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager

from tracekit.errors import InputError
from tracekit.report.figures.canvas import (
    _COLORS,
    INK,
    MOST_NAMED,
    _spread,
    draw,
    kept_axis,
    label_ends,
    lines,
    log_ticks,
    styles,
)
from tracekit.report.load import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRANGE = [
    "$\\frac{x}{",
    "<b>&\"'",
    "\u7b56\u7565",
    "a\u202eb",
    "x" * 90,
    'font-size: 11px " 1.23456',
]


def point(family: str, x: float, mean: float) -> Point:
    return Point(family, family, "local", True, "kept_frac", x, x, mean, mean / 2, mean * 2, 5, 0)


def picture(names: list[str], named: list[str] | None = None) -> str:
    curves = {name: [point(name, 0.2, 0.3), point(name, 0.123456, 0.1)] for name in names}
    looks = styles(names)

    def paint(axes: Axes) -> None:
        kept_axis(axes)
        label_ends(axes, lines(axes, curves, looks, names if named is None else named), looks)

    return draw("some-name", paint)


def _variables() -> dict[str, tuple[str, str]]:
    css = (files("tracekit.report") / "templates" / "style.css").read_text(encoding="utf-8")
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)
    return {name: (light, dark) for name, light, dark in found}


def _luminance(color: str) -> float:
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def _contrast(a: str, b: str) -> float:
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_text_has_a_contrast_of_4_5_on_its_ground(theme: int) -> None:
    color = {name: pair[theme] for name, pair in _variables().items()}
    for ground in ("ground", "raised"):
        for text in ("ink", "soft", "link"):
            assert _contrast(color[text], color[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize("theme", [0, 1])
def test_lines_have_a_contrast_of_3_on_the_page(theme: int) -> None:
    ground = _variables()["ground"][theme]
    assert all(_contrast(color, ground) >= 3 for color in _COLORS if color != INK)


def test_forty_series_all_look_different_and_keep_their_look() -> None:
    names = [f"policy-{number:02d}" for number in range(40)]
    looks = styles(names)
    assert len({(s.color, str(s.dash), s.marker) for s in looks.values()}) == 40
    assert styles(reversed(names)) == looks


@given(st.lists(st.floats(-0.5, 1.5), max_size=20).map(sorted))
def test_labels_keep_their_order_and_do_not_overlap(heights: list[float]) -> None:
    placed = _spread(heights)
    gap = min(0.075, 1 / max(1, len(heights) - 1))
    assert len(placed) == len(heights)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert all(-1e-9 <= height <= 1 for height in placed)


def test_as_many_names_as_a_figure_may_have_fit_under_each_other() -> None:
    placed = _spread([0.5] * (MOST_NAMED + 2))
    pixels = [4.4 * 0.75 * 72 * (b - a) for a, b in pairwise(placed)]
    assert min(pixels) >= 11  # the font size


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_is_drawn_as_text(name: str) -> None:
    svg = picture([name, "plain"])
    assert "<b>" not in svg
    assert "\u202e" not in svg
    assert svg.endswith("</svg>")


def test_what_is_written_in_a_picture_is_not_shortened() -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture(["1.23456  font-size: 1"]))
    assert "1.23456  font-size: 1" in texts


def test_ids_begin_with_a_code_of_the_figure_are_unique_and_all_referred_to() -> None:
    svg = picture(["a", "b"])
    ids = re.findall(r'\bid="([^"]*)"', svg)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    assert len(ids) == len(set(ids))
    assert set(ids) == used
    assert len({one.rpartition("-")[0] for one in ids}) == 1


def test_a_picture_has_the_colour_of_the_page_and_no_address() -> None:
    svg = picture(["a", "b"])
    assert INK not in svg
    assert "currentColor" in svg
    assert "http" not in svg
    assert svg == picture(["a", "b"])


def test_series_without_a_name_are_grey_and_have_no_label() -> None:
    svg = picture(["a", "b"], named=["a"])
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "a" in texts
    assert "b" not in texts
    assert "stroke-opacity: 0.25" in svg


def test_the_removed_fraction_runs_against_the_kept_one() -> None:
    svg = picture(["a"])
    assert {">removed<", ">kept fraction of the cache<"} <= set(re.findall(r">[a-z ]+<", svg))
    sums: dict[str, int] = {}
    for x, percent in re.findall(r'<text[^>]* x="([^"]*)"[^>]*>(\d+)\u00a0%<', svg):
        sums[x] = sums.get(x, 0) + int(percent)
    assert list(sums.values()) == [100] * 6


@pytest.mark.parametrize(("least", "most", "count"), [(0.01, 1.0, 5), (1e-6, 1.0, 7)])
def test_logarithmic_axes_have_few_plain_ticks(least: float, most: float, count: int) -> None:
    def paint(axes: Axes) -> None:
        axes.plot([least, most], [1, 2])
        axes.set(xscale="log", xlim=(least, most))
        log_ticks(axes.xaxis)
        ticks = [one for one in axes.get_xticks() if least <= one <= most]
        assert len(ticks) == count

    assert "<svg" in draw("log", paint)


def test_no_font_at_all_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    cache = type(font_manager.fontManager)._findfont_cached
    cache.cache_clear()
    with pytest.raises(InputError, match="no font is found") as caught:
        draw("x", lambda axes: None)
    assert caught.value.exit_code == 3
    cache.cache_clear()
