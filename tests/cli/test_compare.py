"""``tracekit compare``: its three outputs, its exit codes, and names that could be markup."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
import typer

from tests.report.fake import KEPT, POLICIES, make_results, write_table
from tracekit.cli.compare import compare
from tracekit.cli.output import WIDTH
from tracekit.errors import GateFailedError, InputError, TracekitError, UsageError
from tracekit.report.compare.markdown import markdown
from tracekit.report.compare.parts import MOST_ROWS, Part
from tracekit.schema import ALL, KV_RESULTS

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "od`d|na\nme<b>@all"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return results, and the same with one policy worse."""
    folder = tmp_path_factory.mktemp("made")
    a, b = make_results(folder / "a", num_sequences=8), folder / "b"
    frame = pq.read_table(a / "kv.parquet").to_pandas()
    frame = frame[frame["layer"] == ALL].astype({"policy": object})
    write_table(a, KV_RESULTS, frame)
    run = json.loads((a / "run.json").read_text())
    for one in run["sequences"]:
        one |= {"prompt_sha256": one["prompt_id"], "tokens_sha256": one["sequence_id"]}
    (a / "run.json").write_text(json.dumps(run))
    shutil.copytree(a, b)
    worse = frame["output_error"] + 0.3 * (frame["policy"] == "h2o:kept=0.5")
    write_table(b, KV_RESULTS, frame.assign(output_error=worse))
    return a, b


def call(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return what the command prints."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(compare)
    try:
        app([str(one) for one in words], standalone_mode=False)
    finally:
        out = capsys.readouterr().out
    return out


def test_text_fits_the_terminal_and_has_the_worst_first(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = call(capsys, *made)
    assert max(map(len, text.splitlines())) <= WIDTH
    table = text.split("output_error, level local")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if ":kept=" in line]
    assert len(rows) == min(MOST_ROWS, len(POLICIES) * len(KEPT))
    assert rows[0].split()[0] == "h2o:kept=0.5"
    assert rows[0].split()[-1] == "worse"
    assert "the same model" in text


def test_json_is_strict_and_has_every_difference(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    data = json.loads(call(capsys, *made, "--json"), parse_constant=refuse)
    errors = [one for one in data["differences"] if one["measure"] == "output_error"]
    assert len(errors) == len(POLICIES) * len(KEPT)
    worst = max(errors, key=lambda one: one["difference"])
    assert (worst["name"], worst["n"], worst["verdict"]) == ("h2o:kept=0.5", 8, "worse")
    assert data["passed"] is None


def test_a_gate_fails_after_everything_was_printed(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = (*made, "--fail-if", "error>0.02", "--fail-if", "error.low@snapkv>0")
    with pytest.raises(GateFailedError, match="1 of 24 tested cells"):
        call(capsys, *words, "--json", "-o", out)
    data = json.loads(out.read_text())
    assert [one["passed"] for one in data["gate"]] == [False, True]
    assert data["passed"] is False
    assert "ledger" in data
    assert "passed" in call(capsys, *made, "--fail-if", "error>0.4")


def test_markdown_has_whole_tables_and_goes_into_a_file(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.md"
    assert call(capsys, *made, "--markdown", "-o", out) == ""
    tables = re.findall(r"(?:^\|.*\n)+", out.read_text() + "\n", flags=re.MULTILINE)
    assert len(tables) >= 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_names_cannot_break_out_of_a_markdown_cell() -> None:
    text = markdown([Part(HOSTILE, (HOSTILE,), ("name",), ((HOSTILE,), ("\x00\u202e",), ("ok",)))])
    title, line, table = text.strip().split("\n\n")
    rows = table.splitlines()
    assert rows[2] == "| `` od`d\\|na me<b>@all `` |"
    assert rows[3] == "| `<U+0000><U+202E>` |"
    assert rows[4] == "| ok |"
    assert title == f"### {line}" == "### od\\`d\\|na me\\<b\\>\\@all"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--json", "--markdown"), UsageError),
        (("--measure", ","), UsageError),
        (("--measure", "nix"), UsageError),
        (("--fail-if", "error"), UsageError),
        (("--fail-if", "kl>0"), InputError),
        (("-o", "no/such/folder/out.txt"), InputError),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    made: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    error: type[TracekitError],
) -> None:
    with pytest.raises(error) as found:
        call(capsys, *made, *words)
    assert "\n" not in str(found.value)


def test_the_command_line_is_read_without_torch(made: tuple[Path, Path]) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from tracekit.cli.compare import compare;"
        f"compare(Path({str(made[0])!r}), Path({str(made[1])!r}));"
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
