"""The command line as a user meets it: fresh processes, exit codes, one sentence an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tracekit.cli.app import main
from tracekit.simulate.plan import VOCAB

PROGRAM = Path(sys.executable).with_name("tracekit")


def run(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run tracekit and check its exit code; warnings are errors there too."""
    fixed = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [PROGRAM, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | fixed | env,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


class Here:
    """Runs the command line in this process: what it prints and its exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, *arguments: object, code: int = 0) -> tuple[str, str]:
        """Return standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["tracekit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        assert "Traceback" not in err
        return out, err


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)


def test_record_simulate_report_and_validate_work_one_after_the_other(
    here: Here, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    trace, results, page = tmp_path / "t", tmp_path / "r", tmp_path / "report.html"
    common = ("--model", model_folder, "--prompts", prompt_file, "-o", trace, "--max-new-tokens", 5)
    done = json.loads(run("record", *common, "--json").stdout)
    assert done["num_sequences"] == done["num_new"] == 5
    assert json.loads(here.run("record", *common, "--json")[0])["num_new"] == 0
    here.run("validate", trace)
    done = json.loads(run("simulate", trace, "-o", results, "--sizes", "8,32", "--json").stdout)
    # 5 sequences; 11 policies, estimators and the steps' own facts, two cells of attention.
    assert done["num_computed"] == 5 * (11 + len(VOCAB) + 1 + 2)
    assert not done["failed"]
    again = json.loads(here.run("simulate", trace, "-o", results, "--sizes", "8,32", "--json")[0])
    assert (again["num_computed"], again["num_found"]) == (0, done["num_computed"])
    assert run("report", results, "-o", page).stdout.strip() == str(page)
    text = page.read_text(encoding="utf-8")
    assert "<script>alert(1)" not in text
    for folder in (trace, results):
        shown, _ = here.run("show", folder)
        assert max(len(line) for line in shown.splitlines() if line.startswith(" ")) <= 100
        json.loads(here.run("show", folder, "--json")[0])


def test_settings_that_differ_are_named(
    here: Here, model_folder: Path, prompt_file: Path, trace_folder: Path, tmp_path: Path
) -> None:
    trace = shutil.copytree(trace_folder, tmp_path / "t")
    _, err = here.run(
        *("record", "--model", model_folder, "--prompts", prompt_file, "-o", trace, "--seed", 4),
        code=3,
    )
    assert "seed is 4, was 0" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["record", "--model", "smollm2-135m"], 2, "-o"),
        (["frobnicate"], 2, "frobnicate"),
        (["record", "--model", "MODEL", "--prompts", "nowhere.txt", "-o", "OUT"], 3, "nowhere.txt"),
        (["record", "--model", "./no-such-folder", "-o", "OUT"], 3, "no-such-folder"),
        (
            ["record", "--model", "MODEL", "--capture", "all", "-o", "OUT"],
            2,
            "unknown capture 'all'",
        ),
        (["record", "--model", "MODEL", "-o", "FOREIGN"], 3, "holds something that is no trace"),
        (["simulate", "FOREIGN", "-o", "OUT"], 3, "is no trace"),
        (["simulate", "TRACE", "-o", "FOREIGN"], 3, "no results folder"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "h20"], 2, "did you mean 'h2o'"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "h2o:kept=0"], 2, "kept"),
        (["simulate", "TRACE", "-o", "OUT", "--vocab", "frequncy"], 2, "did you mean 'frequency'"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "h2o:kept=0.5+imt4"], 2, "mean 'int4'"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "h2o", "--kept", "1.5"], 2, "(0, 1]"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "quest", "--bandwidths", "2"], 2, "2000,25"),
        (["simulate", "TRACE", "-o", "OUT", "--kv", "h2o", "--jobs", "0"], 2, "jobs=0"),
        (["simulate", "TRACE", "--kv", "h2o"], 2, "say where the results go"),
        (["simulate", "TRACE", "--explain", "plain#0"], 2, "SEQUENCE,LAYER,HEAD"),
        (["simulate", "TRACE", "-o", "OUT", "--sizes", "many"], 2, "--sizes takes numbers"),
        (["simulate", "TRACE", "-o", "OUT", "--level", "propagate"], 2, "unknown level"),
        (["simulate", "TRACE", "-o", "OUT", "--convention", "llama"], 2, "no convention 'llama'"),
        (["simulate", "TRACE", "-o", "OUT", "--rule", "rows:0.1"], 2, "go with --layers"),
        (["simulate", "TRACE", "-o", "OUT", "--layers", "--rule", "rows:9"], 2, "(0, 1]"),
        (
            ["simulate", "TRACE", "-o", "OUT", "--layers", "--fit-budget", "b.json"],
            2,
            "from one policy at several amounts",
        ),
        (["report", "FOREIGN", "-o", "OUT.html"], 3, "FOREIGN"),
        (["show", "FOREIGN"], 3, "is no trace"),
        (["validate", "FOREIGN"], 3, "is no trace"),
    ],
)
def test_bad_input_gets_one_sentence_and_its_exit_code(
    here: Here,
    model_folder: Path,
    trace_folder: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    foreign = tmp_path / "FOREIGN"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    places = {
        "MODEL": str(model_folder),
        "TRACE": str(trace_folder),
        "FOREIGN": str(foreign),
        "OUT": str(tmp_path / "out"),
    }
    _, err = here.run(*[places.get(argument, argument) for argument in arguments], code=code)
    assert words in err.replace("\n", " ")
    if code != 2:
        assert len(err.strip().splitlines()) == 1
    assert (foreign / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("asked", [("--level", "propagated", "--kv", "h2o"), ("--layers",)])
def test_another_model_than_the_traces_ends_it_with_one_sentence(
    here: Here, trace_folder: Path, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    other = tmp_path / "other"
    tiny.model(seed=5).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    flags = ("simulate", trace_folder, "-o", tmp_path / "r", *asked)
    _, said = here.run(*flags, "--model", other, code=4)
    assert said.count("is not the model of the trace") == 1
    assert said.strip().splitlines()[-1].startswith("tracekit: ")
    _, said = here.run(*flags, "--model", tmp_path / "nowhere", code=3)
    assert said.count("nowhere") == 1


def test_a_point_that_no_sequence_has_ends_it_with_one_sentence(
    here: Here, trace_folder: Path, tmp_path: Path
) -> None:
    flags = ("simulate", trace_folder, "-o", tmp_path / "r", "--level", "propagated")
    _, said = here.run(*flags, "--kv", "h2o:kept=0.5,at=4000", code=3)
    assert "nothing of this applies to any sequence" in said.strip().splitlines()[-1]


def test_policies_are_run_inside_the_model(here: Here, trace_folder: Path, tmp_path: Path) -> None:
    flags = ("simulate", trace_folder, "-o", tmp_path / "r", "--level", "propagated")
    kv = ("--kv", "h2o:every=4", "--kv", "full", "--kept", "0.3,0.6")
    done = json.loads(here.run(*flags, *kv, "--json")[0])
    assert (done["num_computed"], done["failed"]) == (2 * 5, [])
    for name in ("kv", "logits", "logit_stats"):
        assert (tmp_path / "r" / f"{name}.parquet").exists()
    said, _ = here.run(*flags, *kv, "--convention", "llama.cpp")
    assert "10 cells computed" in said
    assert here.run("report", tmp_path / "r", "-o", tmp_path / "report.html")[0]
    _, said = here.run(*flags, "--kv", "influence:kept=0.3", code=5)
    assert "influence probes" in said
    assert said.strip().splitlines()[-1].startswith("tracekit: 5 cells failed")


def test_layers_are_swept_and_a_budget_is_fitted_from_them(
    here: Here, trace_folder: Path, tmp_path: Path
) -> None:
    flags = ("simulate", trace_folder, "-o", tmp_path / "r", "--layers", "--kept", "0.2,0.5")
    budget = tmp_path / "budget.json"
    fit = ("--rule", "snapkv:window=4", "--fit-budget", budget, "--fit-kept", 0.4)
    done = json.loads(here.run(*flags, "--rule", "rows:0.1", *fit, "--json")[0])
    assert (done["num_computed"], done["failed"]) == (5, [])
    assert "layers=heads_file" in done["fitted"]
    assert len(json.loads(budget.read_text())) == 4
    said, _ = here.run(*flags, "--rule", "rows:0.1", *fit)
    assert "5 found" in said
    assert "rows:0.1" in said
    policy = f"snapkv:kept=0.4,window=4,layers=heads_file,file={budget},head_floor=0.0"
    again = ("simulate", trace_folder, "-o", tmp_path / "r", "--kv", policy)
    assert "5 cells computed" in here.run(*again, "--level", "propagated")[0]


def test_a_skipped_prompt_is_named_and_the_exit_code_says_so(
    here: Here, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "fine"}\n{"prompt": ""}\n{"prompt": "\xff"}\n')
    _, err = here.run(
        *("record", "--model", model_folder, "--prompts", tmp_path / "p.jsonl"),
        *("-o", tmp_path / "t", "--max-new-tokens", 2),
        code=5,
    )
    assert "line 2" in err
    assert "line 3" in err
    assert "2 were skipped" in err.strip().splitlines()[-1]


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "--debug", "show", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "Traceback" in done.stderr


def test_list_and_doctor_answer_in_json(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.loads(here.run("list", "--json")[0])
    assert {"h2o", "snapkv", "streaming"} <= {one["name"] for one in listed["policies"]}
    assert {"oracle", "lowrank"} <= {one["name"] for one in listed["estimators"]}
    assert "core" in listed["prompts"]
    monkeypatch.setenv("TRACEKIT_CACHE", str(tmp_path))
    done = json.loads(here.run("doctor", "--json")[0])
    assert done["cache"] == str(tmp_path)
    assert done["problems"] == []


def test_output_projections_are_stored_where_they_are_asked_for(
    here: Here, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    from tracekit.trace.reader import Trace

    flags = ("record", "--model", model_folder, "--prompts", prompt_file, "--store-oproj")
    here.run(*flags, "--max-new-tokens", 1, "--limit", 1, "-o", tmp_path / "t")
    assert Trace(tmp_path / "t").output_projection(3) is not None
    _, said = here.run(*flags, "--capture", "hidden", "-o", tmp_path / "u", code=2)
    assert "needs capture qkv" in said


def test_every_command_and_flag_is_known() -> None:
    """Flags are a contract: a new one is added here on purpose."""
    import typer

    from tracekit.cli.app import app

    command = typer.main.get_command(app)
    found = {
        name: sorted(option for one in sub.params for option in one.opts)
        for name, sub in command.commands.items()
    }
    assert found == {
        "doctor": ["--json"],
        "import": [],
        "list": ["--json"],
        "record": sorted(
            [
                "--model",
                "-o",
                "--out",
                "--prompts",
                "--text",
                "--conversations",
                "--window",
                "--stride",
                "--limit",
                "--samples",
                "--chat",
                "--special-tokens",
                "--probes",
                "--probe-dtype",
                "--probe-layers",
                "--probe-from",
                "--probe-seed",
                "--capture",
                "--maps",
                "--attention-topk",
                "--hidden-layers",
                "--dtype-store",
                "--head",
                "--store-oproj",
                "--max-new-tokens",
                "--temperature",
                "--top-k",
                "--top-p",
                "--min-p",
                "--repetition-penalty",
                "--seed",
                "--batch-size",
                "--prefill-chunk",
                "--dtype",
                "--device",
                "--device-map",
                "--dry-run",
                "--trust-remote-code",
                "--overwrite",
                "--progress",
                "--config",
                "--json",
            ]
        ),
        "report": sorted(
            [
                "results",
                "-o",
                "--out",
                "--memory",
                "--kl-bound",
                "--alpha",
                "--delta",
                "--config",
                "--json",
            ]
        ),
        "plan": sorted(
            [
                "--model",
                "--layers",
                "--kv-heads",
                "--head-dim",
                "--context",
                "--kept",
                "--memory",
                "--batch",
                "--bytes",
                "--results",
                "--policy",
                "--weights-bytes",
                "--config",
                "--json",
            ]
        ),
        "compare": sorted(
            [
                "a",
                "b",
                "--policy",
                "--against",
                "--measure",
                "--fail-if",
                "--level",
                "--markdown",
                "--json",
                "-o",
                "--out",
                "--config",
            ]
        ),
        "show": sorted(
            [
                "--attended",
                "--config",
                "--group",
                "--json",
                "--policy",
                "--sequence",
                "--size",
                "--vocab",
                "folder",
            ]
        ),
        "simulate": sorted(
            [
                "trace",
                "-o",
                "--out",
                "--kv",
                "--vocab",
                "--kept",
                "--sizes",
                "--attention",
                "--explain",
                "--level",
                "--layers",
                "--rule",
                "--heads",
                "--fit-budget",
                "--fit-kept",
                "--probe-block",
                "--convention",
                "--calibrate",
                "--model",
                "--device",
                "--kv-bytes",
                "--bandwidths",
                "--jobs",
                "--seed",
                "--progress",
                "--config",
                "--json",
            ]
        ),
        "validate": ["--json", "trace"],
    }
    formats = command.commands["import"].commands
    assert {
        name: sorted(o for one in sub.params for o in one.opts) for name, sub in formats.items()
    } == {
        "kld": sorted(
            [
                "file",
                "--model",
                "-o",
                "--out",
                "--overwrite",
                "--trust-remote-code",
                "--progress",
                "--json",
            ]
        )
    }


def test_a_text_in_windows_is_recorded_with_maps_and_shown(
    here: Here, model_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "river.txt"
    text.write_text("the river in the morning " * 8, encoding="utf-8")
    out = tmp_path / "t"
    flags = ("--text", text, "--window", 30, "--stride", 20, "--maps", "0,-1", "--batch-size", 2)
    said, _ = here.run(
        "record", "--model", model_folder, *flags, "--attention-topk", 4, "-o", out, "--json"
    )
    assert json.loads(said)["num_sequences"] > 2
    assert json.loads(here.run("validate", out, "--json")[0])["problems"] == []
    assert "river.txt#w0000" in here.run("show", out)[0]


def test_a_dry_run_says_what_it_would_be_and_writes_nothing(
    here: Here, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    flags = ("record", "--model", model_folder, "--prompts", prompt_file, "-o", tmp_path / "t")
    said = json.loads(here.run(*flags, "--max-new-tokens", 9, "--dry-run", "--json")[0])
    assert not (tmp_path / "t").exists()
    assert said["num_sequences"] == 5
    assert said["num_new"] == 6 * 9
    assert said["num_bytes"]["tensors.parquet"] > 0
    assert "tensors.parquet" in here.run(*flags, "--dry-run")[0]


def test_two_sources_are_refused(here: Here, model_folder: Path, tmp_path: Path) -> None:
    flags = ("record", "--model", model_folder, "-o", tmp_path / "t")
    _, said = here.run(*flags, "--text", "a", "--prompts", "core", code=2)
    assert "two sources" in said
    _, said = here.run(*flags, "--window", 5, code=2)
    assert "--text" in said
    text = tmp_path / "a.txt"
    text.write_text("the river", encoding="utf-8")
    _, said = here.run(*flags, "--text", text, "--temperature", 0.5, code=2)
    assert "nothing is drawn" in said
    _, said = here.run(*flags, "--text", text, "--stride", 5, code=2)
    assert "give a window" in said
    _, said = here.run("record", "--model", model_folder, "-o", "memory://x", code=2)
    assert "ends with this process" in said
    _, said = here.run(*flags, "--maps", "first", code=2)
    assert "names no layers" in said


def test_a_chat_without_a_template_is_refused_in_one_sentence(
    here: Here, model_folder: Path, prompt_file: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare)
    (bare / "chat_template.jinja").unlink()
    flags = ("record", "--model", bare, "--prompts", prompt_file, "--max-new-tokens", 2)
    _, said = here.run(*flags, "--chat", "-o", tmp_path / "t", code=3)
    assert "--chat needs a chat template" in said
    here.run(*flags, "--raw", "-o", tmp_path / "raw")
