"""Options from a TOML file: flags, then the environment, then the file, then defaults."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 typer reads annotations when it runs
from typing import TYPE_CHECKING, Annotated

import pytest
import typer
from typer.testing import CliRunner

from tests.report import fake
from tracekit.cli import app as application
from tracekit.cli.config import configurable
from tracekit.cli.progress import Style
from tracekit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable


def command(
    place: Annotated[str, typer.Argument()],
    name: Annotated[str, typer.Option("-n", "--name", envvar="TK_NAME")] = "default",
    many: Annotated[list[str] | None, typer.Option()] = None,
    number: Annotated[int, typer.Option()] = 1,
    share: Annotated[float | None, typer.Option()] = None,
    folder: Annotated[Path | None, typer.Option()] = None,
    style: Annotated[Style, typer.Option()] = Style.auto,
    chat: Annotated[bool | None, typer.Option("--chat/--raw")] = None,
    long_name: Annotated[bool, typer.Option("--long-name")] = False,
) -> None:
    """Print what was given."""
    given = {"place": place, "name": name, "many": many, "number": number, "share": share}
    given |= {"folder": folder and str(folder), "style": style.value, "chat": chat}
    typer.echo(json.dumps(given | {"long_name": long_name}))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., dict[str, object]]:
    """Return what a command was given, of a file's text and flags."""
    app = typer.Typer()
    app.command("one")(configurable(command))
    app.command("two")(configurable(command))
    app.command("plain")(command)
    file = tmp_path / "f.toml"

    def run(text: str, *flags: str, **env: str) -> dict[str, object]:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        done = CliRunner().invoke(app, ["one", "here", "--config", str(file), *flags], env=env)
        if done.exception is not None:
            raise done.exception
        found: dict[str, object] = json.loads(done.stdout)
        return found

    return run


def test_the_file_stands_between_the_environment_and_the_defaults(
    ask: Callable[..., dict[str, object]],
) -> None:
    assert ask("[one]")["name"] == "default"
    assert ask('[one]\nname = "file"')["name"] == "file"
    assert ask('[one]\nname = "file"', TK_NAME="environment")["name"] == "environment"
    assert ask('[one]\nname = "file"', "-n", "flag", TK_NAME="environment")["name"] == "flag"
    assert ask("[one]\nchat = true", "--raw")["chat"] is False
    assert ask('[one]\nmany = ["a"]', "--many", "b")["many"] == ["b"]


def test_every_kind_of_option_is_read(ask: Callable[..., dict[str, object]]) -> None:
    text = """
[two]
name = "of another command"
[one]
name = 0.25
many = ["a", "b"]
number = 7
share = 1
folder = "x/y"
style = "plain"
chat = false
"long_name" = true
"""
    assert ask(text) == {
        "place": "here",
        "name": "0.25",
        "many": ["a", "b"],
        "number": 7,
        "share": 1.0,
        "folder": "x/y",
        "style": "plain",
        "chat": False,
        "long_name": True,
    }
    assert ask('[one]\nmany = "alone"')["many"] == ["alone"]
    assert ask("[one]\nlong-name = true")["long_name"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[one]\n# nmae\nnmae = "x"', "line 3: unknown option 'nmae'; did you mean 'name'?"),
        ('[one]\nplace = "x"', "line 2: unknown option 'place'"),
        ('[one]\nconfig = "x"', "line 2: unknown option 'config'"),
        ("[one]\n\nnumber = 1.5", "line 3: 'number' takes a whole number, unlike 1.5"),
        ("[one]\nnumber = true", "'number' takes a whole number, unlike True"),
        ('[one]\nshare = "half"', "'share' takes a number, unlike 'half'"),
        ("[one]\nname = ['a']", "'name' takes text, unlike ['a']"),
        ("[one]\nmany = [['a']]", "'many' takes text, or a list of them"),
        ("[one]\nlong-name = 1", "'long-name' takes true or false, unlike 1"),
        ("[one]\nname = 2026-01-01", "'name' takes text"),
        ("[one]\n[one.name]", "'name' takes text, unlike {}"),
        ('[one]\nstyle = "plane"', "did you mean 'plain'?"),
        ("[one]\nlong-name = true\nlong_name = true", "line 3: 'long_name' is there twice"),
        ("[two]\nname = 'x'\n[onne]\n", "line 3: unknown table 'onne'; did you mean 'one'?"),
        ("[plain]\n[one]", "line 1: unknown table 'plain'"),
        ("name = 'x'\n[one]", "line 1: 'name' stands in no table; put it below [one]"),
        ("[[one]]\nname = 'x'", "line 1: [[one]] starts a list of tables; write [one], once."),
        ("one = []", "line 1: 'one' stands in no table"),
        ("[one]\nname = 'x'\n[one.number]", "line 3: 'number' takes a whole number, unlike {}"),
        ("[one]\n[one.nmae.deep]", "line 2: unknown option 'nmae'"),
        ("[one]\n[ 'onne' . x ] # x", "line 2: unknown table 'onne'"),
        ("\ufeff[one]\n\nnmae = 1", "line 3: unknown option 'nmae'"),
        ("[two]", "has no table [one] but [two]"),
        ("", "has no table [one] but nothing"),
        ("[one]\nname = \nmany = 1", "is no valid TOML (Invalid value (at line 2, column 8))"),
        ("[one]\nname = 'a'\nname = 'b'", "is no valid TOML (Cannot overwrite a value"),
        ("[one]\nname = '\udcff'", "is no valid TOML"),
        ("[one]\nname = " + "[" * 5000, "is no valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    ask: Callable[..., dict[str, object]], text: str, words: str
) -> None:
    with pytest.raises(InputError) as found:
        ask(text)
    assert words in str(found.value)
    assert "f.toml" in str(found.value)
    assert len(str(found.value).splitlines()) == 1


def _run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: object
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tracekit", *map(str, flags)])
    with pytest.raises(SystemExit) as ended:
        application.main()
    return int(ended.value.code or 0), capsys.readouterr().err


def test_a_missing_file_ends_it_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place in (tmp_path / "nowhere.toml", tmp_path):
        code, said = _run(monkeypatch, capsys, "report", tmp_path, "--config", place)
        assert code == 3
        assert "cannot be read" in said
        assert len(said.strip().splitlines()) == 1


def test_a_file_without_a_name_is_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = _run(monkeypatch, capsys, "report", tmp_path, "--config", "")
    assert (code, "--config names no file" in said) == (3, True)


def test_a_mark_of_the_byte_order_is_passed_over(ask: Callable[..., dict[str, object]]) -> None:
    assert ask('\ufeff[one]\nname = "file"')["name"] == "file"


ANEW, GOES_ON = "the same command starts from the beginning", "the same command goes on from there"


@pytest.mark.parametrize(
    ("words", "called", "left"),
    [
        ("report r -o x.html", "tracekit.report.render.write_report", ANEW),
        ("plan --results r", "tracekit.report.load.load_results", ANEW),
        ("compare r s", "tracekit.report.compare.compare", ANEW),
        ("simulate t -o r", "tracekit.simulate.run.simulate", GOES_ON),
        ("import kld f --model m -o t", "tracekit.record.kld.import_kld", GOES_ON),
    ],
)
def test_ctrl_c_is_one_sentence_that_says_what_the_same_command_does(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    called: str,
    left: str,
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(called, stop)
    code, said = _run(monkeypatch, capsys, *words.split())
    assert (code, said.count("\n")) == (130, 1)
    assert said.startswith("tracekit: interrupted; ")
    assert said.endswith(f"{left}.\n")


def test_options_that_are_required_may_stand_in_the_file(tmp_path: Path) -> None:
    def needy(name: Annotated[str, typer.Option()]) -> None:
        typer.echo(name)

    app, file = typer.Typer(), tmp_path / "f.toml"
    app.command("one")(configurable(needy))
    app.command("two")(configurable(command))
    file.write_text('[one]\nname = "x"\n[two]\n')
    assert CliRunner().invoke(app, ["one", "--config", str(file)]).stdout == "x\n"
    file.write_text("[one]\n")
    assert CliRunner().invoke(app, ["one", "--config", str(file)]).exit_code == 2


@pytest.mark.parametrize("name", ["record", "simulate", "report", "show"])
def test_the_commands_that_have_options_take_a_file(name: str) -> None:
    sub = typer.main.get_command(application.app).commands[name]  # type: ignore[attr-defined]
    assert "config" in {param.name for param in sub.params}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--alpha", "0"], "--alpha is a share"),
        (["--delta", "1"], "--delta is a share"),
        (["--kl-bound", "nan"], "--kl-bound is a KL"),
        (["--memory", "much"], "much"),
    ],
)
def test_what_a_report_is_asked_is_checked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    words: str,
) -> None:
    results = fake.make_results(tmp_path / "r", num_sequences=1, questions=())
    code, said = _run(monkeypatch, capsys, "report", results, "-o", tmp_path / "x.html", *flags)
    assert code == 2
    assert words in said


def test_a_report_hears_what_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(
        "tracekit.report.render.write_report", lambda results, out, options: asked.append(options)
    )
    file = tmp_path / "f.toml"
    file.write_text('[report]\nmemory = "2GiB"\nalpha = 0.2\nkl_bound = 1\n')
    code, said = _run(monkeypatch, capsys, "report", tmp_path, "--config", file, "--alpha", "0.3")
    assert code == 0, said
    (options,) = asked
    assert (options.memory_bytes, options.alpha) == (2 * 2**30, 0.3)
    assert (options.kl_bound_nats, options.delta) == (1.0, 0.1)


def test_simulate_runs_what_a_report_recommends(
    trace_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from tracekit.report.load import load_results
    from tracekit.report.recommendation.paste import config_text
    from tracekit.simulate.plan import make_plan

    policy = make_plan(["h2o:kept=0.5,every=4"]).policies[0].text
    file, out = tmp_path / "f.toml", tmp_path / "out"
    results = fake.make_results(tmp_path / "r", num_sequences=1)
    file.write_text(config_text(load_results(results), policy, ["Said."]), encoding="utf-8")
    flags = ("simulate", trace_folder, "-o", out, "--config", file, "--progress", "none")
    code, said = _run(monkeypatch, capsys, *flags, "--level", "local")
    assert code == 0, said
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert run["plan"]["kv"] == [policy]
    assert run["plan"]["levels"] == ["local"]
