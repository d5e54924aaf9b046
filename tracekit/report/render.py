"""Results become one HTML file that opens offline, and a folder with its figures and numbers."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from tracekit.errors import InputError
from tracekit.report.blocks import Absent, Section
from tracekit.report.figures.figure import Figure
from tracekit.report.formats import count, number, percent, visible
from tracekit.report.load import Results, load_results
from tracekit.report.options import Options

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_report(results: Path, out: Path, options: Options | None = None) -> Path:
    """Write the report of a results folder.

    Parameters
    ----------
    results
        Folder that ``tracekit simulate`` wrote.
    out
        HTML file to write; its figures and their numbers go to ``<stem>-files`` beside it.
    options
        What is asked of it; None: nothing in particular.

    Returns
    -------
    Path
        ``out``. The same results and options give the same bytes.

    Raises
    ------
    InputError
        If the folder holds no results that this version reads, or ``out`` cannot be written.
    """
    out = Path(out)
    _refuse_target(out)
    loaded = load_results(Path(results))
    sections = _sections(loaded, options or Options())
    figures = [part for one in sections for part in one.parts() if isinstance(part, Figure)]
    folder = out.with_name(f"{out.stem}-files")
    page = _page(loaded, sections, folder.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            _write(folder / f"{figure.name}.{figure.ending}", figure.content)
            _write(folder / f"{figure.name}.csv", figure.csv)
        # Lone surrogates have no UTF-8 form: they are written out as escapes.
        _write(out, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise _unwritable(out, error) from error
    return out


def _refuse_target(out: Path) -> None:
    """Refuse what is no file, for it is replaced: a device or a pipe would be gone."""
    if not out.name:
        msg = f"-o names no file ({out} is a folder); give it an HTML file such as report.html."
        raise InputError(msg)
    try:
        is_other = out.exists() and not out.is_file()
    except OSError as error:
        raise _unwritable(out, error) from error
    if is_other:
        what = "a folder" if out.is_dir() else "no regular file"
        msg = f"{out} is {what}; give -o an HTML file."
        raise InputError(msg)


def _unwritable(out: Path, error: OSError) -> InputError:
    return InputError(
        f"The report {out} cannot be written ({error.strerror}); choose another place."
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: it is whole or not there."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sections(results: Results, options: Options) -> list[Section]:
    """Return the sections that have something to say, and one of what is absent."""
    # matplotlib is loaded when there is something to draw, not when the package is imported.
    from tracekit.report.sections import ORDER

    sections, missing = [], []
    for make in ORDER:
        made = make(results, options)
        if isinstance(made, Absent):
            missing.append(made)
        else:
            sections.append(made)
    if missing:
        sections.append(
            Section(
                name="absent",
                title="What these results do not hold",
                short="Not here",
                blocks=tuple(missing),
            )
        )
    return sections


def _page(results: Results, sections: Sequence[Section], files: str) -> str:
    environment = Environment(
        loader=PackageLoader("tracekit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {
        "count": count,
        "number": number,
        "percent": percent,
        "base64": lambda data: base64.b64encode(data).decode("ascii"),
    }
    context = {
        "run": results.run,
        "spec": results.spec,
        "sections": sections,
        "files": quote(files),
    }
    return environment.get_template("report.html.j2").render(**context)


def _shown(value: Any) -> Any:
    """Write out control and bidi characters of a text; leave markup of our own as it is."""
    return visible(value) if type(value) is str else value
