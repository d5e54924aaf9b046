"""The section on the shape of attention, against means taken one value at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import make_results, spec, write_table
from tracekit.measure.stats import bootstrap_mean
from tracekit.report.blocks import Absent, Items, Section
from tracekit.report.figures.distance_mass import attention_by_distance, layer_thirds
from tracekit.report.figures.effective_keys import effective_keys_by_layer
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options
from tracekit.report.sections.attention import _ranges, section
from tracekit.report.tables import HtmlTable
from tracekit.schema import ALL, ATTENTION_RESULTS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NUM_LAYERS, NUM_HEADS = 7, 3


def rows(seed: int = 0, sequences: int = 5, **replaced: Any) -> pd.DataFrame:
    """Return made-up attention rows; ``replaced`` columns are functions of layer and heads."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(sequences):
        for layer in range(NUM_LAYERS):
            for kv_head in (*range(NUM_HEADS), ALL):
                mass = draw.dirichlet(np.ones(4 + number))
                row = {
                    "sequence_id": f"story-{number}#0",
                    "domain": "story",
                    "bucket": "< 256",
                    "level": "local",
                    "layer": layer,
                    "kv_head": kv_head,
                    "num_scored": 9,
                    "seen_keys": 100.0 + number,
                    "key_mass": 1.0,
                    "entropy_nats": float(draw.uniform(0.5, 3)),
                    "entropy_frac": float(draw.uniform(0, 1)),
                    "effective_keys": float(draw.uniform(1, 20)),
                    "keys_95_frac": float(draw.uniform(0, 1)),
                    "row_quantile": 0.9,
                    "needed_frac_95": float(draw.uniform(0.2, 0.3)),
                    "first_1_mass": float(mass[0]),
                    "distance_mass": mass[1:].tolist(),
                    "newest_32_mass": float(draw.uniform(0, 1)),
                    "overlap_lags": [1, 2],
                    "overlap": [0.9, 0.8],
                    "half_life_rows": None if layer == 0 else float(draw.uniform(1, 9)),
                    "group_jaccard": None,
                    "kv_head_jaccard": float(draw.uniform(0, 1)),
                    "next_layer_jaccard": None,
                }
                made.append(row | {name: of(layer, kv_head) for name, of in replaced.items()})
    return pd.DataFrame(made)


def results(folder: Path, frame: pd.DataFrame | None, **run: Any) -> Results:
    make_results(folder / "r", num_sequences=5, questions=("kv",), run=run)
    if frame is not None:
        write_table(folder / "r", ATTENTION_RESULTS, frame)
    return load_results(folder / "r")


def made(found: Section | Absent) -> Section:
    assert isinstance(found, Section)
    return found


def findings(found: Section | Absent) -> dict[str, str]:
    (items,) = (part for part in made(found).parts() if isinstance(part, Items))
    return dict(items.items)


def claim(found: Section | Absent) -> str:
    return findings(found)["Claim: shallow layers are more spread out"]


def test_without_attention_rows_the_command_that_gets_them_is_told(tmp_path: Path) -> None:
    found = section(results(tmp_path, None), Options())
    assert isinstance(found, Absent)
    assert found.command == "tracekit simulate TRACE -o NEW_RESULTS --attention"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_thirds_hold_each_layer_once_in_order(layers: set[int]) -> None:
    thirds = layer_thirds(layers)
    assert [layer for part in thirds.values() for layer in part] == sorted(layers)
    sizes = [len(part) for part in thirds.values()]
    assert len(sizes) == min(3, len(layers))
    assert max(sizes) - min(sizes) <= 1
    for name, part in thirds.items():
        assert str(part[0]) in name
        assert str(part[-1]) in name


def mean_of(frame: pd.DataFrame, layers: Iterable[int], pick: Any) -> list[float]:
    """Return, one row at a time, the mean over layers of each sequence."""
    values: dict[str, list[float]] = {}
    for row in frame.to_dict("records"):
        if row["kv_head"] == ALL and row["layer"] in layers:
            values.setdefault(row["sequence_id"], []).append(pick(row))
    return [fmean(of) for of in values.values()]


def test_mass_by_distance_is_the_mean_over_layers_then_sequences(tmp_path: Path) -> None:
    frame = rows()
    figure = attention_by_distance(results(tmp_path, frame))
    assert figure is not None
    table = figure.table
    assert list(table["distance_tokens"].unique()) == [
        *("first key", "0", "1", "2-3", "4-7", "8-15", "16-31", "32-63")
    ]
    for name, layers in layer_thirds(range(NUM_LAYERS)).items():
        part = table[table["layers"] == name].reset_index(drop=True)
        assert part["mass"].sum() == pytest.approx(1, abs=1e-6)
        for at in range(7):
            values = mean_of(
                frame,
                layers,
                lambda row, at=at: dict(enumerate(row["distance_mass"])).get(at, 0.0),
            )
            expected = bootstrap_mean(values, seed=0)
            found = part.loc[at + 1]
            assert found["mass"] == pytest.approx(expected.mean, abs=1e-6)
            assert found["low"] == pytest.approx(expected.low, abs=1e-6)
            assert found["n"] == 5
        first = fmean(mean_of(frame, layers, lambda row: row["first_1_mass"]))
        assert part.loc[0, "mass"] == pytest.approx(first, abs=1e-6)
        assert f"{name}: " in figure.alt


def test_effective_keys_are_means_over_sequences_of_each_layer(tmp_path: Path) -> None:
    frame = rows()
    table = effective_keys_by_layer(results(tmp_path, frame)).table
    picks = {
        "1 / sum a\u00b2": lambda row: row["effective_keys"],
        "exp(entropy)": lambda row: math.exp(row["entropy_nats"]),
        "keys seen": lambda row: row["seen_keys"],
    }
    assert set(table["measure"]) == set(picks)
    for row in table.to_dict("records"):
        values = mean_of(frame, [row["layer"]], picks[row["measure"]])
        expected = bootstrap_mean(values, seed=0)
        assert (row["keys"], row["low"], row["high"]) == pytest.approx(
            (expected.mean, expected.low, expected.high), rel=1e-5
        )


@pytest.mark.parametrize(
    ("effective", "verdict"),
    [
        (lambda layer, _: 20.0 - layer, "holds here"),
        (lambda layer, _: 2.0 + layer, "refuted here"),
        (lambda layer, _: 3.0 + (layer == 3), "not decided here"),
    ],
)
def test_the_claim_on_shallow_layers_follows_the_interval(
    effective: Any, verdict: str, tmp_path: Path
) -> None:
    said = claim(section(results(tmp_path, rows(effective_keys=effective)), Options()))
    assert said.startswith(verdict)
    assert ("Widest: middle" in said) == (verdict == "not decided here")


def test_two_sequences_decide_nothing(tmp_path: Path) -> None:
    frame = rows(sequences=2, effective_keys=lambda layer, _: 20.0 - layer)
    said = claim(section(results(tmp_path, frame), Options()))
    assert said.startswith("not decided: an interval needs 3 sequences")


def test_layers_and_heads_with_sinks_are_named(tmp_path: Path) -> None:
    def mass(layer: int, kv_head: int) -> float:
        return 0.6 if layer in (2, 3, 6) and kv_head != 0 else 0.1

    said = findings(section(results(tmp_path, rows(first_1_mass=mass)), Options()))["First key"]
    assert "6 of 21 KV heads are sinks" in said
    assert said.endswith("most heads are: 2-3, 6.")
    assert "most in layer 2 (60\u00a0%)" in said


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_number_once(numbers: set[int]) -> None:
    text = _ranges(sorted(numbers))
    found: list[int] = []
    for part in text.split(", ") if text else []:
        first, *rest = map(int, part.split("-"))
        found += range(first, (rest[0] if rest else first) + 1)
    assert found == sorted(numbers)


def test_what_layers_need_is_told_with_the_extremes(tmp_path: Path) -> None:
    frame = rows(needed_frac_95=lambda layer, _: 0.9 if layer == 4 else 0.1 + layer / 100)
    said = findings(section(results(tmp_path, frame), Options()))
    text = said["Claim: no one kept fraction fits all layers"]
    assert text.startswith("holds here")
    assert "of the mass of 90\u00a0% of the rows" in text
    assert "in layer 0" in text
    assert "in layer 4" in text


def test_traces_with_recorded_statistics_alone_show_what_they_have(tmp_path: Path) -> None:
    names = ("distance_mass", "first_1_mass", "keys_95_frac", "needed_frac_95", "overlap")
    frame = rows().assign(**dict.fromkeys((*names, "key_mass", "half_life_rows")))
    folder = results(tmp_path, frame)
    folder.run["trace"]["capture"] = "hidden"
    found = section(folder, Options())
    (absent,) = (part for part in made(found).parts() if isinstance(part, Absent))
    assert absent.command.startswith("tracekit record --model smollm2-135m --prompts core")
    assert list(findings(found)) == ["Breadth", "Claim: shallow layers are more spread out"]
    (table,) = (part for part in made(found).parts() if isinstance(part, HtmlTable))
    assert "half-life" not in " ".join(row[0].text for row in table.rows)


def test_lasting_layers_are_counted_beside_the_half_life(tmp_path: Path) -> None:
    found = section(results(tmp_path, rows()), Options())
    (table,) = (part for part in made(found).parts() if isinstance(part, HtmlTable))
    by_name = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    shares = by_name["layers without one: more than half stay"]
    assert [text.split(" ")[0] for text in shares] == ["33\u00a0%", "0\u00a0%", "0\u00a0%"]
    assert "top keys shared inside a group of query heads" not in by_name


def test_sink_logits_and_windows_are_told(tmp_path: Path) -> None:
    layers = tuple(replace(one, window=64 if one.index % 2 else None) for one in spec().layers)
    trace = {
        "path": "trace",
        "capture": "qkv",
        "run_id": "0",
        "created": "",
        "sampler": {},
        "host": {},
        "spec": replace(spec(), layers=layers).to_json(),
    }
    folder = results(tmp_path, rows(key_mass=lambda *_: 0.75), trace=trace)
    said = findings(section(folder, Options()))
    assert said["Sink logits"].startswith("take 25\u00a0%")
    figure = attention_by_distance(folder)
    assert figure is not None
    assert "15 of 30 layers see no more than their newest 64 keys" in figure.caption


def test_the_same_results_give_the_same_figures(tmp_path: Path) -> None:
    folder = results(tmp_path, rows())
    again = load_results(tmp_path / "r")
    assert section(folder, Options()) is not None
    first, second = attention_by_distance(folder), attention_by_distance(again)
    assert first is not None
    assert second is not None
    assert (first.content, first.csv) == (second.content, second.csv)
    one, other = effective_keys_by_layer(folder), effective_keys_by_layer(again)
    assert (one.content, one.csv) == (other.content, other.csv)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_models_of_one_or_two_layers_have_as_many_groups(num_layers: int, tmp_path: Path) -> None:
    frame = rows()
    found = section(results(tmp_path, frame[frame["layer"] < num_layers]), Options())
    (table,) = (part for part in made(found).parts() if isinstance(part, HtmlTable))
    assert len(table.columns) == 1 + num_layers
    assert ("Claim: shallow layers are more spread out" in findings(found)) == (num_layers == 2)
