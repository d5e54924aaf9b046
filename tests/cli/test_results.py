"""``tracekit show RESULTS`` where results have several levels, and their calibration."""

from __future__ import annotations

import json
import math
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tracekit import schema
from tracekit.cli.app import main
from tracekit.cli.output import WIDTH, emit
from tracekit.cli.results import read_results
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.record.recorder import record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def calibrated(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, prompt_file: Path
) -> Path:
    """Run the command line: predicted everywhere, all three levels on three sequences."""
    folder = tmp_path_factory.mktemp("calibrated")
    probes = ProbeOptions(number=2, dtype="float32")
    options = RecordOptions(max_new_tokens=12, capture="influence", probes=probes)
    record(str(model_folder), str(prompt_file), folder / "t", options)
    simulate(folder / "t", folder / "r", "--level", "predicted", "--calibrate", "3")
    return folder / "r"


def simulate(trace: Path, out: Path, *more: str, code: int = 0) -> None:
    names = ("knorm", "random", "int4", "oracle", "quest", "h2o:kept=0.5+int4")
    kv = [word for name in names for word in ("--kv", name)]
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["simulate", str(trace), "-o", str(out), *kv, "--kept", "0.2,0.5,0.8", *more]
        patch.setattr(sys, "argv", ["tracekit", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code or 0) == code


def test_levels_are_shown_apart_each_with_its_own_measures(calibrated: Path) -> None:
    text = read_results(calibrated)[1]
    titles = [line for line in text.splitlines() if line.startswith("kv, level ")]
    assert titles == [
        f"kv, level {one}" for one in ("local", "predicted", "propagated") for _ in "12"
    ]
    heads = {
        "local": "output_error",
        "predicted": "kl_predicted_nats",
        "propagated": "same_top_frac",
    }
    for level, measure in heads.items():
        table = text.split(f"kv, level {level}\n")[1].split("kv, level")[0]
        assert measure in table
        assert not [other for other in heads.values() if other != measure and other in table]
    stacked = [line for line in text.splitlines() if line.startswith("stacking, ")]
    assert [line.split(",")[1] for line in stacked] == [
        " output_error_sq",
        " kl_predicted_nats",
        " kl_nats",
    ]


def test_a_calibration_is_shown_with_a_sentence_that_says_what_a_prediction_is(
    calibrated: Path,
) -> None:
    data, text = read_results(calibrated)
    rows = {(row["statistic"], row["level"]): row for row in data["calibration"]}
    whole = rows["spearman", "predicted"]
    table, sentence = text.split("calibration against level propagated on ")[1].split("\n\n\n")[:2]
    assert table.startswith(f"{whole['num_cells']} cells")
    assert {line.split()[0] for line in table.splitlines()[4:] if line.strip(" \u2500")} >= {
        "spearman",
        "spearman_within",
        "spearman_lowest",
        "log_pearson",
        "pairs_ordered",
        "propagated_over_predicted",
        "power_law_a",
        "left_out_factor",
    }
    sentence = " ".join(sentence.split("\n\n")[0].split())
    assert sentence.startswith("predicted is an estimate: on 3 sequences (")
    assert f"{whole['value']:.3g} [" in sentence
    assert "lowest within a sequence" in sentence
    assert "by a factor of" in sentence
    assert "after the power law" in sentence
    assert max(map(len, text.splitlines()[1:])) <= WIDTH
    json.dumps(data)


def test_results_of_one_level_have_no_calibration(results_folder: Path) -> None:
    data, text = read_results(results_folder)
    assert data["calibration"] == []
    assert "estimate" not in text
    assert "kv, level local" in text


def test_json_holds_what_strict_readers_take(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(word: str) -> Any:
        raise ValueError(word)

    values = [math.inf, -math.inf, math.nan, 0.1, 1e300, "NaN", None, True, "\u00e9"]
    emit({"rows": [{"x": one} for one in values], "pair": (math.inf, 1)}, "", as_json=True)
    read = json.loads(capsys.readouterr().out, parse_constant=refused)
    told = ["inf", "-inf", None, 0.1, 1e300, "NaN", None, True, "\u00e9"]
    assert [row["x"] for row in read["rows"]] == told
    assert read["pair"] == ["inf", 1]


def test_infinite_results_are_shown_as_strict_json(
    results_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(word: str) -> Any:
        raise ValueError(word)

    folder = tmp_path / "r"
    shutil.copytree(results_folder, folder)
    path = folder / "summary.parquet"
    summary = pq.read_table(path).to_pydict()
    summary["high"] = [math.inf] * len(summary["high"])
    pq.write_table(schema.SUMMARY.build(len(summary["high"]), summary), path)
    emit(*read_results(folder), as_json=True)
    read = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert {row["high"] for row in read["summary"]} == {"inf"}


@pytest.mark.parametrize("number", ["0", "-2"])
def test_a_calibration_on_no_sequence_is_refused(
    trace_folder: Path, tmp_path: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(trace_folder, tmp_path / "r", "--calibrate", number, code=2)
    assert f"a calibration on {number} sequences is none" in capsys.readouterr().err


def test_a_calibration_without_probes_says_how_to_record_them(
    trace_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(trace_folder, tmp_path / "r", "--calibrate", "2", code=3)
    said: Any = capsys.readouterr().err
    assert "needs influence probes" in said
    assert "--capture influence" in said
