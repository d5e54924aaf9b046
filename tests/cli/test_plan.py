from __future__ import annotations

import json
import math
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.fake import make_results, write_table
from tracekit.cli.app import main
from tracekit.cli.sizes import parse_size, parse_tokens, size_text
from tracekit.errors import UsageError
from tracekit.schema import SUMMARY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[str, str]]

QUOTED = ("--layers", 32, "--kv-heads", 40, "--head-dim", 64, "--context", "64k")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["tracekit", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        return out, err

    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_results(tmp_path_factory.mktemp("plan") / "r", num_sequences=6)


def planned(run: Run, *arguments: object) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(*arguments, "--json")[0])
    return data


def test_the_quoted_example_is_in_the_help_and_reproduced_by_its_flags(run: Run) -> None:
    text = " ".join(run("--help")[0].split())
    assert "21.5 GB, not 34.4" in text
    assert "--layers 32 --kv-heads 40 --head-dim 64" in text
    assert planned(run, *QUOTED)["rows"][0]["request_bytes"] == 21_474_836_480
    assert "21.5 GB (20 GiB)" in run(*QUOTED)[0]


def test_what_fits_is_counted_before_and_after(run: Run) -> None:
    data = planned(
        run, *QUOTED, "--memory", "80GiB", "--weights-bytes", "20GiB", "--kept", "0.3,0.5"
    )
    full, least, half = data["rows"]
    gib, one = 2**30, 20
    assert data["room_bytes"] == 60 * gib
    assert [row["requests"] for row in (full, least, half)] == [3, 10, 6]
    # 60 GiB for a batch of 8 is 7.5 GiB a request: 24 576 of 65 536 tokens.
    assert full["longest_tokens"] == 24_576
    assert half["longest_tokens"] == 49_152
    assert full["batches"] == {str(size): size * one * gib for size in (1, 2, 4, 8, 16, 32, 64)}


def test_both_kinds_of_units_are_told_apart(run: Run) -> None:
    rooms = [planned(run, *QUOTED, "--memory", text)["memory_bytes"] for text in ("80GB", "80GiB")]
    assert rooms == [80e9, 80 * 2**30]


def test_a_batch_of_ones_own_is_in_the_table(run: Run) -> None:
    data = planned(run, *QUOTED, "--batch", 12, "--memory", "240GiB")
    assert data["rows"][0]["batches"]["12"] == 12 * 20 * 2**30
    assert data["rows"][0]["longest_tokens"] == 65_536
    assert "Batch 12 needs 258 GB (240 GiB)" in run(*QUOTED, "--batch", 12, "--memory", "240GiB")[0]


def test_the_text_says_what_to_do_first_and_gives_numbers_for_the_claim(run: Run) -> None:
    out = " ".join(run(*QUOTED, "--memory", "80GiB", "--weights-bytes", "26GB")[0].split())
    assert "first: spend the memory on batch. 2 requests fit in full" in out
    assert "kept 0.3 makes it 9" in out
    # 8 x 2.5 GiB of 8 x 2.5 GiB + 26 GB; 8 x 20 GiB of 8 x 20 GiB + 26 GB.
    assert "45% at 8,192 and 87% at 65,536 tokens" in out


def test_a_request_that_does_not_fit_at_all_is_said_so(run: Run) -> None:
    out = " ".join(run(*QUOTED, "--memory", "16GiB")[0].split())
    assert "not one full cache of this length fits" in out
    assert "weights: size not known and not subtracted" in out


def test_a_model_folder_is_planned_for_without_its_weights(run: Run, model_folder: Path) -> None:
    data = planned(run, "--model", model_folder / "config.json", "--memory", "1MiB")
    # 4 layers, 2 KV heads of 8: 2 x 4 x 2 x 8 numbers of 2 bytes a token.
    assert data["first_token_bytes"] == 256
    assert data["context_tokens"] == 512
    assert data["rows"][0]["request_bytes"] == 512 * 256
    assert data["rows"][0]["requests"] == (2**20 - data["weight_bytes"]) // (512 * 256)


def test_kept_fractions_of_results_are_the_measured_ones_with_n_level_and_interval(
    run: Run, results: Path
) -> None:
    data = planned(
        run, "--results", results, "--policy", "h2o", "--kept", "0.3", "--memory", "1GiB"
    )
    row = data["rows"][1]
    summary = pq.read_table(results / "summary.parquet").to_pandas()
    chosen = summary[
        (summary["family"] == "h2o")
        & (summary["target"] == 0.25)
        & (summary["measure"] == "kept_frac")
        & (summary["domain"] == "all")
    ].iloc[0]
    assert row["asked_frac"] == 0.25
    assert row["kept_frac"] == chosen["mean"]
    assert (row["low"], row["high"], row["n"]) == (chosen["low"], chosen["high"], 6)
    assert row["level"] == "local"
    assert row["policy"] == "h2o:kept=0.25"
    assert row["cost_of"] == "output_error, local"
    assert row["request_bytes"] == pytest.approx(chosen["mean"] * data["rows"][0]["request_bytes"])
    out = run("--results", results, "--policy", "h2o", "--memory", "1GiB")[0]
    assert "as measured on smollm2-135m" in out


def test_without_a_policy_each_causal_one_has_a_row_and_bounds_have_none(
    run: Run, results: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    for path in results.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    summary: pd.DataFrame = pq.read_table(folder / "summary.parquet").to_pandas()
    summary["causal"] = summary["family"] != "knorm"
    write_table(folder, SUMMARY, summary.astype({"family": str}))
    names = [row["name"] for row in planned(run, "--results", folder)["rows"]]
    assert names == ["full", "h2o 0.25", "random 0.25", "snapkv 0.25", "streaming 0.25"]


def test_one_policy_of_the_table_of_batches_is_left_out_aloud(run: Run, results: Path) -> None:
    assert "1 more with --json" in " ".join(run("--results", results)[0].split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to plan for"),
        (("--layers", 32), "go together"),
        ((*QUOTED, "--model", "x"), "go together"),
        (("--layers", 0, "--kv-heads", 1, "--head-dim", 1), "--layers is at least 1"),
        (
            ("--layers", 1_001, "--kv-heads", 1, "--head-dim", 1),
            "--layers is at least 1 and at most",
        ),
        (("--layers", 1, "--kv-heads", 65_537, "--head-dim", 1), "--kv-heads is at least 1 and at"),
        (("--layers", 1, "--kv-heads", 1, "--head-dim", 10**40), "--head-dim is at least 1 and at"),
        (("--layers", 10**1000, "--kv-heads", 1, "--head-dim", 1), "--layers is at least 1 and at"),
        (QUOTED[:-2], "give --context"),
        ((*QUOTED, "--kept", "30%"), "--kept"),
        ((*QUOTED, "--kept", "0"), "--kept"),
        ((*QUOTED, "--kept", "nan"), "--kept"),
        ((*QUOTED, "--kept", "9e-7"), "--kept is a fraction of at least 1e-06"),
        ((*QUOTED, "--kept", "1e-320"), "--kept is a fraction of at least 1e-06"),
        ((*QUOTED, "--memory", "1e308GB"), "at most 1e+24 bytes"),
        ((*QUOTED, "--memory", "80G"), "GB or GiB"),
        ((*QUOTED, "--memory", "lots"), "no size"),
        ((*QUOTED, "--context", "0"), "no whole number of tokens"),
        ((*QUOTED[:-1], "1e300"), "at most 1,099,511,627,776"),
        ((*QUOTED, "--batch", 0), "--batch is at least 1"),
        ((*QUOTED, "--batch", 10**400), "--batch is at least 1 and at most 1,000,000"),
        ((*QUOTED, "--bytes", 0), "--bytes is at least 0.0625 and at most 8"),
        ((*QUOTED, "--bytes", "nan"), "--bytes is at least"),
        ((*QUOTED, "--bytes", "1e-300"), "--bytes is at least"),
        ((*QUOTED, "--policy", "h2o"), "give --results"),
    ],
)
def test_a_wrong_question_is_one_sentence_and_code_2(
    run: Run, arguments: tuple[object, ...], words: str
) -> None:
    _, err = run(*arguments, code=2)
    assert words in err
    assert err.startswith("tracekit: ")
    assert err.count("\n") == 1


def test_the_limits_themselves_are_planned_for(run: Run) -> None:
    shape = ("--layers", 1_000, "--kv-heads", 65_536, "--head-dim", 65_536, "--context", 2**40)
    rest = ("--kept", "1e-6", "--batch", 1_000_000, "--bytes", 8, "--memory", "1e24")
    data = planned(run, *shape, *rest)
    assert data["rows"][0]["request_bytes"] == 8.0 * 2 * 1_000 * 65_536**2 * 2**40
    least = ("--layers", 1, "--kv-heads", 1, "--head-dim", 1, "--context", 1, "--bytes", 0.0625)
    row = planned(run, *least, "--kept", "1e-6", "--memory", "1e24")["rows"][1]
    assert row["requests"] == 8 * row["longest_tokens"] == 8 * int(1e24) * 10**6
    run(*shape, *rest)


def write_summary(folder: Path, results: Path, *more: pd.DataFrame) -> Path:
    """Write the same results with more rows in their summary."""
    shutil.copytree(results, folder)
    summary = pq.read_table(folder / "summary.parquet").to_pandas().astype({"family": str})
    write_table(folder, SUMMARY, pd.concat([summary, *more], ignore_index=True))
    return folder


def test_the_peak_decides_what_fits_at_peak_and_the_last_level_the_cost(
    run: Run, results: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(results / "summary.parquet").to_pandas()
    kept = rows[(rows["measure"] == "kept_frac") & (rows["family"] == "h2o")]
    peak = kept.assign(measure="peak_frac", mean=[min(1.2, 2 * one) for one in kept["mean"]])
    cost = kept.assign(measure="kl_nats", level="propagated", mean=0.25, n=3)
    # What another level kept is of other sequences, and is not shown.
    other = kept.assign(level="propagated", mean=0.9)
    folder = write_summary(tmp_path / "r", results, peak, cost, other)
    flags = ("--results", folder, "--policy", "h2o", "--kept", "0.1,0.5", "--memory", "2GiB")
    data = planned(run, *flags)
    full, *others = data["rows"]
    assert (full["peak_frac"], full["requests_at_peak"]) == (None, full["requests"])
    for row in others:
        assert row["level"] == "local"
        assert row["kept_frac"] < 0.9
        assert row["peak_frac"] == pytest.approx(min(1.2, 2 * row["kept_frac"]))
        held = min(1, row["peak_frac"]) * full["request_bytes"]
        assert row["requests_at_peak"] == int(data["room_bytes"] / held)
        assert row["requests_at_peak"] < row["requests"]
        told = (row["cost"], row["cost_n"], row["cost_of"])
        assert told == (0.25, 3, "kl_nats, propagated")


def test_bytes_a_number_are_those_of_the_results_and_never_count_twice(
    run: Run, results: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(results / "summary.parquet").to_pandas()
    stacked = rows[rows["family"] == "h2o"].assign(
        family="h2o+int4", name=lambda frame: frame["name"].astype(str) + "+int4:group=32"
    )
    folder = write_summary(tmp_path / "r", results, stacked)
    file = folder / "run.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["plan"]["kv_bytes"] = 4
    file.write_text(json.dumps(content), encoding="utf-8")
    for flags in ((), ("--bytes", 4)):
        data = planned(run, "--results", folder, *flags)
        assert data["bytes_per_number"] == 4
    _, err = run("--results", folder, "--bytes", 2, code=2)
    assert "--bytes 2 does not go with h2o+int4" in err
    assert "beside 4 bytes a number" in err
    # What an eviction keeps is the same share at any size of a number.
    data = planned(run, "--results", folder, "--bytes", 1, "--policy", "h2o")
    assert data["bytes_per_number"] == 1
    assert data["rows"][1]["request_bytes"] == pytest.approx(
        data["rows"][1]["kept_frac"] * data["rows"][0]["request_bytes"]
    )


def test_a_policy_that_results_lack_is_named_with_those_they_have(run: Run, results: Path) -> None:
    _, err = run("--results", results, "--policy", "tova", code=2)
    assert "it has: h2o, knorm, random, snapkv, streaming" in err


def test_a_missing_model_is_code_3(run: Run) -> None:
    assert "no model folder or file" in run("--model", "/no/such/model", code=3)[1]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24e9),
        ("512MiB", 2**29),
        ("1e9", 1e9),
        ("1.5 tb", 1.5e12),
        ("7", 7),
        (".5KiB", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: float) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "0", "nan", "inf", "1e999", "12XB", "1,5GB", "8k"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("1.0", 1),
        ("64k", 65_536),
        ("64K", 65_536),
        ("1M", 1_048_576),
        ("8192", 8192),
        ("1.5k", 1536),
    ],
)
def test_lengths_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "0", "0.5", "0.0005k", "-5", "1.5", "64kB", "nan", "1e300", "k"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_tokens(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B (0 B)"),
        (999.4, "999 B (999 B)"),
        (999.5, "1 kB (0.976 KiB)"),
        (1000, "1 kB (0.977 KiB)"),
        (999.4e6, "999 MB (953 MiB)"),
        (999.5e6, "1 GB (953 MiB)"),
        (999.5 * 2**20, "1.05 GB (0.976 GiB)"),
        (21_474_836_480, "21.5 GB (20 GiB)"),
    ],
)
def test_sizes_are_written_in_three_digits_without_an_exponent(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text


@given(st.floats(1, 1e18))
def test_a_written_size_reads_back_within_its_digits(num_bytes: float) -> None:
    decimal, binary = size_text(num_bytes).removesuffix(")").split(" (")
    for text in (decimal, binary):
        value, unit = text.split()
        if unit[0] in "BkKMGT":
            assert math.isclose(parse_size(f"{value}{unit}"), num_bytes, rel_tol=6e-3)
