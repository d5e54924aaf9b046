from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from tests.report.fake import LAYERS, POLICIES, make_results
from tracekit.report.blocks import Absent, Items, Section, Text
from tracekit.report.figures.figure import Figure, Map
from tracekit.report.figures.heat import highest
from tracekit.report.figures.layer_map import layer_map
from tracekit.report.figures.measure import nearest
from tracekit.report.load import Point, Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections import maps
from tracekit.report.sections.maps import rank_correlation, trend
from tracekit.schema import ALL, LAYER_RESULTS, LAYER_SUMMARY, RECOMMENDED, Table
from tracekit.simulate.sensitivity import summarise_layers

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADS = 3
RULES = ("rows:0.03", "snapkv:kept=0.3")
SENSITIVE = 7


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return load_results(make_results(tmp_path_factory.mktemp("m") / "r", num_sequences=6))


def chosen(results: Results) -> dict[str, Point]:
    curves = results.curves("kv", "output_error")
    return {name: nearest(curve) for name, curve in curves.items()}


def with_tables(results: Results, frames: Mapping[Table, pd.DataFrame]) -> Results:
    tables = {one.name: frame for one, frame in frames.items()}
    new = Results(folder=results.folder, run=results.run, spec=results.spec, _frames=tables)
    vars(new)["kv"] = results.kv
    return new


def sweep(*, heads: bool = True, num_sequences: int = 5, seed: int = 0) -> pd.DataFrame:
    """Return the summary of a sweep in which one layer stands out and layer 0 finds nothing."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for rule in RULES:
        for number in range(num_sequences):
            for layer in range(LAYERS):
                for head in (ALL, *(range(HEADS) if heads else ())):
                    kl = float(rng.uniform(0.9, 1.1)) * 0.01 * (8 if layer == SENSITIVE else 1)
                    rows.append(
                        {
                            "sequence_id": f"s{number}",
                            "domain": "story",
                            "rule": rule,
                            "layer": layer,
                            "kv_head": head,
                            "level": "propagated",
                            "is_idle": layer == 0,
                            "nll_full": 1.0,
                            "nll_pruned": 1.0 + kl,
                            "kl_nats": kl / (1 if head == ALL else HEADS),
                            "noise_kl_nats": 1e-9,
                            "num_scored": 60,
                        }
                    )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    frame = LAYER_RESULTS.build(len(rows), columns).to_pandas()
    return pd.DataFrame(summarise_layers(frame, seed=0))


def needed(values: list[float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": range(len(values)),
            "level": "local",
            "kept_frac": values,
            "low": [value - 0.02 for value in values],
            "high": [value + 0.02 for value in values],
            "n": 6,
            "mass_frac": 0.95,
            "quantile": 0.9,
            "mean_frac": [value - 0.05 for value in values],
            "effective_keys": 12.0,
        }
    )


def parts(results: Results) -> list[Any]:
    section = maps.section(results, Options())
    assert isinstance(section, Section)
    return list(section.parts())


def figures(results: Results) -> dict[str, Any]:
    return {part.name: part for part in parts(results) if isinstance(part, Figure)}


def test_the_layer_map_holds_the_means_of_the_cells_that_evicted(results: Results) -> None:
    shown = chosen(results)
    figure = layer_map(results, shown)
    assert figure is not None
    assert figure.columns == tuple(sorted(POLICIES))
    assert figure.rows[0] == "0"
    image = imread(BytesIO(figure.png))
    assert image.shape == (LAYERS, len(POLICIES), 4)
    table = figure.table.set_index(["family", "layer"])
    names = ["policy", "layer", "num_evicted", "output_error"]
    cells: dict[tuple[str, int], list[float]] = {}
    for policy, layer, num_evicted, error in results.kv[names].to_numpy().tolist():
        if num_evicted > 0:
            cells.setdefault((policy, layer), []).append(error)
    for column, family in enumerate(figure.columns):
        for layer in range(LAYERS):
            values = cells.get((shown[family].name, layer), [])
            assert table.loc[(family, layer), "n"] == len(values)
            assert bool(image[layer, column, 3]) == bool(values)
            if values:
                mean = table.loc[(family, layer), "output_error"]
                assert mean == pytest.approx(float(np.mean(values)), rel=1e-6)


def test_a_transform_of_all_entries_is_in_the_layer_map(results: Results) -> None:
    kv = results.kv.copy()
    kv.loc[kv["family"] == "h2o", ["num_evicted", "target_frac"]] = 0, 1.0
    changed = with_tables(results, {})
    vars(changed)["kv"] = kv
    figure = layer_map(changed, chosen(results))
    assert figure is not None
    assert "h2o" in figure.columns


def test_the_caption_names_the_highest_cell_with_its_number(results: Results) -> None:
    figure = layer_map(results, chosen(results))
    assert figure is not None
    top = figure.table.iloc[int(np.nanargmax(figure.table["output_error"].to_numpy()))]
    assert f"Highest: layer {top['layer']} {top['family']} " in figure.caption


def test_without_rows_by_layer_there_is_no_map(results: Results) -> None:
    flat = with_tables(results, {})
    vars(flat)["kv"] = results.kv[results.kv["layer"] == ALL]
    assert layer_map(flat, chosen(results)) is None
    made = maps.section(flat, Options())
    assert isinstance(made, Absent)
    assert made.command == "tracekit simulate TRACE -o RESULTS --layers --heads"


def test_a_sweep_has_a_map_by_rule_and_one_by_head_and_rule(results: Results) -> None:
    made = figures(with_tables(results, {LAYER_SUMMARY: sweep()}))
    assert list(made) == [
        "error-by-layer",
        "sensitivity-by-layer",
        "sensitivity-by-head-0",
        "sensitivity-by-head-1",
    ]
    by_layer, by_head = made["sensitivity-by-layer"], made["sensitivity-by-head-0"]
    assert by_layer.columns == ("rows: 0.03", "snapkv: kept=0.3")
    assert imread(BytesIO(by_layer.png)).shape == (LAYERS, len(RULES), 4)
    assert imread(BytesIO(by_head.png)).shape == (LAYERS, HEADS, 4)
    assert by_head.alt.startswith("Map of KL by layer and KV head under rows:0.03: the largest is")
    assert f"layer {SENSITIVE}" in by_head.alt
    # Nothing was found to drop in layer 0.
    assert not imread(BytesIO(by_layer.png))[0, :, 3].any()


def test_layers_to_protect_are_marked_and_listed_with_their_share(results: Results) -> None:
    rows = sweep()
    made = with_tables(results, {LAYER_SUMMARY: rows})
    assert figures(made)["sensitivity-by-layer"].marked == (str(SENSITIVE),)
    (items,) = (part for part in parts(made) if isinstance(part, Items))
    assert [rule for rule, _ in items.items] == list(RULES)
    is_it = (rows["layer"] == SENSITIVE) & (rows["kv_head"] == ALL) & (rows["rule"] == RULES[0])
    share = float(rows.loc[is_it, "share"].iloc[0])
    assert (
        f"layers to protect: {SENSITIVE} ({100 * share:.0f}\u00a0% of the KL)" in items.items[0][1]
    )
    assert f"KV heads to protect: {SENSITIVE}." in items.items[0][1]


def test_below_three_sequences_no_layer_is_named(results: Results) -> None:
    made = with_tables(results, {LAYER_SUMMARY: sweep(num_sequences=2)})
    (items,) = (part for part in parts(made) if isinstance(part, Items))
    assert all("no claim below 3 sequences" in told for _, told in items.items)
    assert figures(made)["sensitivity-by-layer"].marked == ()


def test_a_sweep_of_layers_alone_says_how_to_get_heads(results: Results) -> None:
    made = parts(with_tables(results, {LAYER_SUMMARY: sweep(heads=False)}))
    commands = [part.command for part in made if isinstance(part, Absent)]
    assert commands == ["tracekit simulate TRACE -o RESULTS --layers --heads"]


def test_without_a_sweep_the_best_policy_shows_its_heads(results: Results) -> None:
    kv = results.kv
    layers = kv[kv["layer"] >= 0]
    heads = [
        layers.assign(kv_head=head, output_error=layers["output_error"] + head)
        for head in range(HEADS)
    ]
    made = with_tables(results, {})
    vars(made)["kv"] = pd.concat([kv, *heads])
    figure = figures(made)["error-by-head"]
    assert isinstance(figure, Map)
    assert figure.columns == ("head 0", "head 1", "head 2")
    best = min(chosen(results).values(), key=lambda point: point.mean)
    assert set(figure.table["policy"]) == {best.name}
    for layer in (0, 11):
        rows = kv[(kv["policy"] == best.name) & (kv["layer"] == layer)]["output_error"]
        cell = figure.table.query(f"layer == {layer} and kv_head == 2")["output_error"]
        assert float(cell.iloc[0]) == pytest.approx(float(rows.mean()) + 2, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([0.2, 0.25, 0.3, 0.5, 0.55, 0.6, 0.7, 0.8], "supports"),
        ([0.8, 0.7, 0.6, 0.55, 0.5, 0.3, 0.25, 0.2], "refutes"),
        ([0.5, 0.3, 0.6, 0.2, 0.7, 0.4, 0.5, 0.45], "cannot tell about"),
    ],
)
def test_what_layers_need_says_whether_shallow_ones_tolerate_most(
    results: Results, values: list[float], word: str
) -> None:
    made = with_tables(results, {RECOMMENDED: needed(values)})
    texts = [part.text for part in parts(made) if isinstance(part, Text)]
    assert any(f'That {word} "shallow layers tolerate most" here.' in text for text in texts)
    figure = figures(made)["needed-by-layer"]
    assert figure.table["kept_frac"].to_list() == values
    assert f"least {100 * min(values):.0f}\u00a0%" in figure.alt


def test_too_few_or_equal_layers_tell_no_trend() -> None:
    for values in ([0.1, 0.9], [0.5] * 9, [0.1, 0.2, 0.3, 0.4]):
        assert "cannot be told" in trend(pd.Series(values), "it")


def slow_ranks(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values
    ]


@given(st.lists(st.integers(0, 9).map(float), min_size=3, max_size=20))
def test_rank_correlation_with_depth_is_spearmans(values: list[float]) -> None:
    found = rank_correlation(pd.Series(values, index=range(5, 5 + len(values))))
    if len(set(values)) < 2:
        assert np.isnan(found)
        return
    ranks, depth = slow_ranks(values), [float(one) for one in range(len(values))]
    a, b = np.mean(ranks), np.mean(depth)
    product = sum((x - a) * (y - b) for x, y in zip(ranks, depth, strict=True))
    squares = sum((x - a) ** 2 for x in ranks) * sum((y - b) ** 2 for y in depth)
    assert found == pytest.approx(product / squares**0.5, abs=1e-9)


@given(
    st.lists(
        st.lists(st.one_of(st.just(np.nan), st.integers(0, 5).map(float)), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_the_highest_cells_are_those_of_a_plain_sort(rows: list[list[float]]) -> None:
    cells = [
        (-value, row, column)
        for row, line in enumerate(rows)
        for column, value in enumerate(line)
        if not np.isnan(value)
    ]
    expected = [(row, column) for _, row, column in sorted(cells)[:5]]
    assert highest(np.array(rows)) == expected
