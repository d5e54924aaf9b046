"""``--config FILE.toml``: options of a command from a table of its name; flags go before them."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from typer.models import OptionInfo

from tracekit.errors import InputError
from tracekit.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}
"""By the type of an option: what TOML may hold for it, in types and in words."""

_ENCODING = "utf-8-sig"  # Some editors write a mark of the byte order first; TOML knows none.

_TEXT = ((str, int, float), "text")  # Of all others: paths, choices, texts; 0.3 is the text "0.3".


@dataclass(frozen=True)
class Setting:
    """An option that a file may set: its parameter, the type of a value, whether it takes several."""

    parameter: str
    kind: type
    is_list: bool

    def read(self, value: Any, what: str) -> Any:
        """Return a value of a TOML file as the option takes it.

        Raises
        ------
        InputError
            If it is of another type, or none of the choices.
        """
        types, words = _KINDS.get(self.kind, _TEXT)
        many = value if self.is_list and type(value) is list else [value]
        if any(type(one) not in types for one in many):
            several = ", or a list of them" if self.is_list else ""
            msg = f"{what} takes {words}{several}, unlike {value!r}."
            raise InputError(msg)
        made = many if self.kind in _KINDS else [str(one) for one in many]
        choices = [str(one.value) for one in self.kind] if issubclass(self.kind, Enum) else made
        for one in made:
            if one not in choices:
                msg = f"{what}: {unknown('choice', one, choices)}"
                raise InputError(msg)
        return made if self.is_list else made[0]


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has ``--config`` as well.

    The file's values stand between the environment and the defaults: a flag or an environment
    variable that is given goes before them.
    """
    signature = inspect.signature(command, eval_str=True)
    settings = _settings(signature)

    def take(ctx: typer.Context, file: Path | None) -> Path | None:
        # Here the options look for their defaults, after flags and the environment.
        if file is not None:
            ctx.default_map = _values(ctx, file, settings)
        return file

    @functools.wraps(command)
    def run(*arguments: Any, config: Path | None = None, **options: Any) -> None:
        del config  # Its callback has done all that there is to do.
        command(*arguments, **options)

    option = typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Options from the table of this command's name in a TOML file; flags go before them.",
        rich_help_panel=_panel(signature),
        is_eager=True,
        callback=take,
    )
    config = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, option],
    )
    parameters = [*signature.parameters.values(), config]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


def read_config(file: Path, command: str, commands: list[str]) -> dict[str, Any]:
    """Return the table of a command, keys as they are written.

    Parameters
    ----------
    file
        TOML file.
    command
        Name of the table.
    commands
        Names of all tables that may stand in it.

    Raises
    ------
    InputError
        If the file cannot be read, is no TOML, holds what is no command's table, or none of this
        command.
    """
    if not file.name:
        msg = "--config names no file; give it a TOML file, or leave it out."
        raise InputError(msg)
    try:
        tables = tomllib.loads(file.read_bytes().decode(_ENCODING))
    except OSError as error:
        msg = f"{file} cannot be read ({error.strerror}); give --config a TOML file."
        raise InputError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{file} is no valid TOML ({error}); mend it there."
        raise InputError(msg) from error
    for name, table in tables.items():
        if type(table) is list and all(type(one) is dict for one in table) and table:
            msg = f"{_place(file, name)}: [[{name}]] starts a list of tables; write [{name}], once."
            raise InputError(msg)
        if type(table) is not dict:
            msg = (
                f"{_place(file, '', name)}: {name!r} stands in no table; put it below [{command}]."
            )
            raise InputError(msg)
        if name not in commands:
            msg = f"{_place(file, name)}: {unknown('table', name, commands)}"
            raise InputError(msg)
    if command not in tables:
        there = ", ".join(f"[{name}]" for name in tables) or "nothing"
        msg = f"{file} has no table [{command}] but {there}; add it, or leave out --config."
        raise InputError(msg)
    found: dict[str, Any] = tables[command]
    return found


def _values(ctx: typer.Context, file: Path, settings: dict[str, Setting]) -> dict[str, Any]:
    """Return the values of a file by the parameters that they are of."""
    command = str(ctx.info_name)
    group: Any = ctx.parent.command if ctx.parent else None
    others = group.commands if group else {}
    tables = {name for name, one in others.items() if "config" in {p.name for p in one.params}}
    table = read_config(file, command, sorted(tables | {command}))
    values: dict[str, Any] = {}
    for key, value in table.items():
        place, name = _place(file, command, key), key.replace("_", "-")
        if name not in settings:
            msg = f"{place}: {unknown('option', key, sorted(settings))}"
            raise InputError(msg)
        setting = settings[name]
        if setting.parameter in values:
            msg = f"{place}: {key!r} is there twice, with a dash and an underscore; keep one."
            raise InputError(msg)
        values[setting.parameter] = setting.read(value, f"{place}: {key!r}")
    return values


def _settings(signature: inspect.Signature) -> dict[str, Setting]:
    """Return the options of a command by their long names, without dashes before them."""
    found = {}
    for one in signature.parameters.values():
        if (info := _option(one)) is None:
            continue
        hint = get_args(one.annotation)[0]
        kind = next((part for part in get_args(hint) if part is not NoneType), hint)
        is_list = list in (get_origin(hint), get_origin(kind))
        if get_origin(kind) is list:
            (kind,) = get_args(kind)
        for name in _long_names(one.name, info):
            found[name] = Setting(one.name, kind, is_list)
    return found


def _option(parameter: inspect.Parameter) -> OptionInfo | None:
    """Return what a parameter's annotation says of it as an option; None for arguments."""
    said = getattr(parameter.annotation, "__metadata__", ())
    return next((one for one in said if type(one) is OptionInfo), None)


def _long_names(parameter: str, info: OptionInfo) -> list[str]:
    """Return the long names of an option; typer makes one where it is given none."""
    given = [str(name) for name in (info.default, *(info.param_decls or ())) if name is not ...]
    # Of --chat/--raw the first is what true stands for.
    long = [name.partition("/")[0][2:] for name in given if name.startswith("--")]
    return long or [parameter.replace("_", "-")]


def _panel(signature: inspect.Signature) -> str | None:
    """Return the help panel of the command's last option."""
    options = filter(None, map(_option, signature.parameters.values()))
    return [None, *(one.rich_help_panel for one in options)][-1]


def _place(file: Path, table: str, key: str = "") -> str:
    """Return the file, and the line of a key in a table, or of the table, where it is found."""
    here, header = "", re.compile(r"\s*\[\[?([^\[\]]*)\]\]?\s*(#.*)?$")
    wanted = ".".join(filter(None, (table, key)))
    for number, line in enumerate(file.read_text(encoding=_ENCODING).splitlines(), start=1):
        if found := header.match(line):
            here = re.sub(r"[\s\"']", "", found[1])
            is_it = f"{here}.".startswith(f"{wanted}.")
        else:
            is_key = re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line)
            is_it = bool(key and is_key) and here == table
        if is_it:
            return f"{file}, line {number}"
    return str(file)
