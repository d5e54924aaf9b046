"""The application: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import functools
import io
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer

from tracekit.cli import (
    compare,
    doctor,
    import_,
    listing,
    plan,
    record,
    report,
    show,
    simulate,
    validate,
)
from tracekit.cli.config import configurable
from tracekit.errors import InterruptedRunError, TracekitError

if TYPE_CHECKING:
    from collections.abc import Callable

app = typer.Typer(
    name="tracekit",
    help=(
        "Record a language model once; replay any KV-cache eviction or vocabulary pruning on it, "
        "exactly."
    ),
    epilog=(
        "Example: tracekit record --model smollm2-135m --prompts core -o trace; "
        "tracekit simulate trace -o results; tracekit report results -o report.html"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


_GOES_ON = "what was finished is kept, and the same command goes on from there"
_STARTS_ANEW = "the same command starts from the beginning"


def _stoppable(command: Callable[..., None], left: str) -> Callable[..., None]:
    """Return a command that says what Ctrl-C left, before typer ends the process without a word."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            msg = f"interrupted; {left}."
            raise InterruptedRunError(msg) from error

    return run


_COMMANDS: dict[str, Callable[..., None]] = {
    "record": record.record,
    "simulate": simulate.simulate,
    "report": report.report,
    "compare": compare.compare,
    "plan": plan.plan,
    "show": show.show,
    "validate": validate.validate,
    "list": listing.list_,
    "doctor": doctor.doctor,
}
_WITHOUT_CONFIG = ("validate", "list", "doctor")  # They have nothing to set.
_RESUMED = ("record", "simulate")
for _name, _command in _COMMANDS.items():
    _whole = _command if _name in _WITHOUT_CONFIG else configurable(_command)
    app.command(_name)(_stoppable(_whole, _GOES_ON if _name in _RESUMED else _STARTS_ANEW))


for _format in import_.import_app.registered_commands:
    assert _format.callback is not None
    _format.callback = _stoppable(_format.callback, _GOES_ON)
app.add_typer(import_.import_app, name="import")


@app.callback()
def options(
    debug: bool = typer.Option(
        False, "--debug", envvar="TRACEKIT_DEBUG", help="Show the traceback of an error."
    ),
) -> None:
    """Record a language model once; replay eviction and pruning policies on it, exactly."""
    if debug:
        os.environ["TRACEKIT_DEBUG"] = "1"


def main() -> None:
    """Run the command line and exit with the code of what happened."""
    # What a terminal cannot show is written out; being told to end is being interrupted.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except TracekitError as error:
        _fail(error, error.exit_code)
    except BrokenPipeError:
        # Whoever reads has seen enough; Python must not try to flush what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 the last line of defence, for our own bugs
        _fail(error, 1)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _fail(error: BaseException, code: int) -> None:
    """Print one sentence, the traceback only if it was asked for, and exit."""
    if os.environ.get("TRACEKIT_DEBUG"):
        traceback.print_exception(error)
    if code == 1:
        text = f"this is a bug in tracekit ({type(error).__name__}: {error}); --debug shows where."
    else:
        text = str(error)
    sys.stderr.write(f"tracekit: {text}\n")
    sys.exit(code)
