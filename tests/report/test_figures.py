from __future__ import annotations

import re
from importlib.resources import files
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from tests.report.fake import LAYERS, POLICIES, make_results
from tracekit.report.answer import ERROR_BOUND
from tracekit.report.figures.canvas import _COLORS, INK, _spread, styles
from tracekit.report.figures.coverage import MASS, coverage
from tracekit.report.figures.error_curve import error_curve
from tracekit.report.figures.layer_map import layer_map
from tracekit.report.figures.memory import memory_by_requests, memory_by_tokens
from tracekit.report.load import Results, load_results
from tracekit.schema import ALL


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(make_results(tmp_path_factory.mktemp("f") / "r", num_sequences=6))


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
    for ground in ("ground", "e1", "e2", "e3", "e4", "e5"):
        for text in ("ink", "prompt"):
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


def test_the_layer_map_holds_the_means_of_the_cells_that_evicted(results: Results) -> None:
    figure = layer_map(results)
    assert figure is not None
    assert figure.columns == tuple(sorted(POLICIES))
    assert figure.rows[0] == "0"
    image = imread(BytesIO(figure.png))
    assert image.shape == (LAYERS, len(POLICIES), 4)
    chosen = dict(zip(figure.table["family"], figure.table["policy"], strict=True))
    table = figure.table.set_index(["family", "layer"])
    names = ["policy", "layer", "num_evicted", "output_error"]
    cells: dict[tuple[str, int], list[float]] = {}
    for policy, layer, num_evicted, error in results.kv[names].to_numpy().tolist():
        if num_evicted > 0:
            cells.setdefault((policy, layer), []).append(error)
    for column, family in enumerate(figure.columns):
        for layer in range(LAYERS):
            values = cells.get((chosen[family], layer), [])
            assert table.loc[(family, layer), "n"] == len(values)
            assert bool(image[layer, column, 3]) == bool(values)
            if values:
                mean = table.loc[(family, layer), "output_error"]
                assert mean == pytest.approx(float(np.mean(values)), rel=1e-6)


def test_the_layer_map_takes_the_kept_fraction_nearest_one_half(results: Results) -> None:
    figure = layer_map(results)
    assert figure is not None
    for family in POLICIES:
        whole = results.kv[(results.kv["family"] == family) & (results.kv["layer"] == ALL)]
        means = {
            policy: rows["kept_frac"].mean()
            for policy, rows in whole[whole["num_evicted"] > 0].groupby("policy")
        }
        chosen = figure.table.loc[figure.table["family"] == family, "kept_frac"].iloc[0]
        assert abs(chosen - 0.5) == pytest.approx(min(abs(m - 0.5) for m in means.values()))


def test_without_rows_by_layer_there_is_no_map(results: Results) -> None:
    whole = results.kv[results.kv["layer"] == ALL]
    flat = Results(**{**vars(results), "kv": whole})
    assert layer_map(flat) is None


def test_memory_is_the_closed_form(results: Results) -> None:
    table = memory_by_tokens(results).table
    last = table[table["tokens"] == 8192].set_index("kept_frac")["kv_bytes"]
    # 2 tensors x 30 layers x 3 heads x 64 numbers x 8192 tokens x 2 bytes.
    assert last[1.0] == 2 * 30 * 3 * 64 * 8192 * 2
    assert last[0.25] == last[1.0] / 4
    requests = memory_by_requests(results).table
    most = requests[(requests["requests"] == 64) & (requests["kept_frac"] == 1)]
    assert most["kv_bytes"].iloc[0] == 64 * last[1.0]


@pytest.mark.parametrize("family", ["$\\frac{x}{", "<b>&\"'", "\u7b56\u7565", "a\u202eb", "x" * 90])
def test_a_strange_name_is_drawn_as_text(results: Results, family: str) -> None:
    summary = results.summary.replace({"family": {"snapkv": family, "lowrank": family}})
    strange = Results(**{**vars(results), "summary": summary})
    for figure in (error_curve(strange, ERROR_BOUND), coverage(strange, MASS)):
        assert "<b>" not in figure.svg
        assert "\u202e" not in figure.svg
        assert figure.svg.endswith("</svg>")


def test_one_point_without_interval_is_drawn(results: Results) -> None:
    one = (results.summary["family"] == "h2o") & (results.summary["target"] == 0.5)
    summary = results.summary[one].assign(low=np.nan, high=np.nan, n=1)
    figure = error_curve(Results(**{**vars(results), "summary": summary}), ERROR_BOUND)
    assert len(figure.table) == 1
    assert "n\u00a0=\u00a01;" in figure.caption
