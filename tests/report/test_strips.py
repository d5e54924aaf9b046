from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from tests.report.fake import make_results, write_table
from tests.report.fake_shown import TRIED_FROM, add_shown
from tracekit import schema
from tracekit.report.figures.pixels import scale
from tracekit.report.load import Results, load_results
from tracekit.report.sections.tokens_shown import ShownSequence, shown_sequences
from tracekit.report.strips import MOST_STRIPS, Strips, kept_strips

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("strips") / "results"
    return load_results(add_shown(make_results(folder, num_sequences=6)))


@pytest.fixture
def sequence(results: Results) -> ShownSequence:
    return shown_sequences(results)[0]


@pytest.fixture
def strips(sequence: ShownSequence) -> Strips:
    return kept_strips("kept-entries-1", sequence)


def pixels_of(png: bytes) -> Any:
    return imread(io.BytesIO(png))


def test_a_pixel_is_a_token_and_its_colour_the_part_of_the_heads(
    strips: Strips, sequence: ShownSequence
) -> None:
    image, colors = pixels_of(strips.content), pixels_of(scale())[0]
    assert image.shape == (1 + len(sequence.left), len(sequence.rows), 4)
    for row, one in zip(image[1:], sequence.left, strict=True):
        for pixel, part in zip(row, one.held_T, strict=True):
            assert pixel[3] == (0 if np.isnan(part) else 1)
            if part in (0, 1):
                np.testing.assert_array_equal(pixel, colors[0 if part == 0 else -1])
    brightest = np.nanargmax(sequence.rows["entropy_nats"])
    np.testing.assert_array_equal(image[0, brightest], colors[-1])
    for strip, row in zip(strips.strips, image, strict=True):
        np.testing.assert_array_equal(pixels_of(strip.png)[0], row)


def test_names_and_numbers_stand_beside_the_strips(strips: Strips, sequence: ShownSequence) -> None:
    entropy, *policies = strips.strips
    assert entropy.point_frac is None
    assert [one.name for one in policies] == ["snapkv", "h2o", "streaming", "knorm", "random"]
    for strip, one in zip(policies, sequence.left, strict=True):
        held = one.held_T[~np.isnan(one.held_T)]
        assert strip.told == f"{100 * held.mean():.0f}\u00a0% held"
        assert strip.point_frac == TRIED_FROM / len(sequence.rows)
        assert f"{strip.name} {100 * held.mean():.0f}\u00a0%" in strips.alt
        assert "later ones 100\u00a0%" in strip.alt


def test_the_file_has_every_token_and_the_page_every_policy(
    strips: Strips, sequence: ShownSequence
) -> None:
    csv = pd.read_csv(io.BytesIO(strips.csv))
    assert csv.columns.tolist()[:3] == ["position", "token", "entropy_nats"]
    for one in sequence.left:
        np.testing.assert_allclose(csv[one.policy.name], one.held_T, rtol=1e-5)
    assert [row[0].text for row in strips.numbers.rows] == [s.name for s in strips.strips[1:]]


def test_flags_of_a_cell_are_said(tmp_path: Path) -> None:
    folder = add_shown(make_results(tmp_path / "r", num_sequences=3))
    kv = load_results(folder).table(schema.KV_RESULTS).copy()
    kv.loc[kv["family"] == "h2o", "is_clipped"] = True
    write_table(folder, schema.KV_RESULTS, kv)
    strips = kept_strips("a", shown_sequences(load_results(folder))[0])
    told = {one.name: one.told for one in strips.strips}
    assert told["h2o"].endswith("held, clipped")
    assert told["snapkv"].endswith("held")
    assert "Clipped: the budget was smaller" in strips.caption


def test_at_most_so_many_policies_have_a_strip(sequence: ShownSequence) -> None:
    from dataclasses import replace

    many = replace(sequence, left=sequence.left * 2)
    strips = kept_strips("a", many)
    assert len(strips.left) == MOST_STRIPS
    assert "2 more policies" in strips.caption
