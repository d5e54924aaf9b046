"""Results become one HTML file that opens offline, and a folder with its figures and numbers."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from tracekit.errors import InputError
from tracekit.report import answer, tables, tokens
from tracekit.report.formats import count, number, percent, visible
from tracekit.report.load import Results, load_results
from tracekit.schema import KV_RESULTS, VOCAB_RESULTS, Column

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tracekit.report.figures.figure import Figure

_KV_DEFINED = ("target_frac", "kept_frac", "output_error", "output_cosine", "mass_kept", "kv_bytes")
_VOCAB_DEFINED = (
    "size",
    "set_size_mean",
    "hit_argmax",
    "hit_chosen",
    "mass",
    "neg_log_mass_nats",
    "nll_full",
    "nll_backoff",
    "cost_frac",
)


def write_report(results: Path, out: Path) -> Path:
    """Write the report of a results folder.

    Parameters
    ----------
    results
        Folder that ``tracekit simulate`` wrote.
    out
        HTML file to write; its figures and their numbers go to ``<stem>-files`` beside it.

    Returns
    -------
    Path
        ``out``. The same results give the same bytes.

    Raises
    ------
    InputError
        If the folder holds no results that this version reads, or ``out`` cannot be written.
    """
    out = Path(out)
    if not out.name or out.is_dir():
        msg = f"{out} is a folder; give -o an HTML file."
        raise InputError(msg)
    loaded = load_results(Path(results))
    figures = {figure.name: figure for figure in _figures(loaded)}
    folder = out.with_name(f"{out.stem}-files")
    page = _page(_context(loaded, figures, folder.name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures.values():
            _write(folder / f"{figure.name}.{figure.kind}", figure.content)
            _write(folder / f"{figure.name}.csv", figure.csv)
        # Lone surrogates have no UTF-8 form: they are written out as escapes.
        _write(out, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        msg = f"The report {out} cannot be written ({error.strerror}); choose another place."
        raise InputError(msg) from error
    return out


def _write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it: it is whole or not there."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _figures(results: Results) -> Iterator[Figure]:
    """Draw every figure for which there are data."""
    # matplotlib is loaded when there is something to draw, not when the package is imported.
    from tracekit.report.figures.calibration import calibration_scatter
    from tracekit.report.figures.coverage import ARGMAX, MASS, coverage
    from tracekit.report.figures.error_curve import error_curve
    from tracekit.report.figures.layer_map import layer_map
    from tracekit.report.figures.memory import memory_by_requests, memory_by_tokens

    if results.has("kv"):
        yield error_curve(results, answer.ERROR_BOUND)
        if (by_layer := layer_map(results)) is not None:
            yield by_layer
    if (calibrated := calibration_scatter(results)) is not None:
        yield calibrated
    if results.has("vocab"):
        yield coverage(results, ARGMAX)
        yield coverage(results, MASS)
    if results.spec.kv_numbers_per_token:
        yield memory_by_tokens(results)
        yield memory_by_requests(results)


def _context(results: Results, figures: Mapping[str, Figure], folder: str) -> dict[str, Any]:
    """Return what the template shows; parts without data are absent."""
    answers, parts, defined = [], [], []
    if results.has("kv"):
        answers.append(answer.kv_answer(results))
        parts += [tables.policies, tables.kv_domains]
        defined += _columns(KV_RESULTS.columns, _KV_DEFINED)
    if results.has("vocab"):
        answers.append(answer.vocab_answer(results))
        parts += [tables.estimators, tables.vocab_domains]
        defined += _columns(VOCAB_RESULTS.columns, _VOCAB_DEFINED)
    parts += [tables.recorded, tables.sequences, tables.skipped, tables.failed]
    return {
        "results": results,
        "run": results.run,
        "spec": results.spec,
        "answers": answers,
        "figures": figures,
        "files": quote(folder),
        "tables": {part.__name__: part(results) for part in parts},
        "shown": tokens.shown_sequences(results),
        "legend": tokens.legend(),
        "defined": defined,
        "domain_sequences": answer.DOMAIN_SEQUENCES,
    }


def _columns(columns: tuple[Column, ...], names: tuple[str, ...]) -> list[Column]:
    """Return columns by name, in the order of the names."""
    by_name = {column.name: column for column in columns}
    return [by_name[name] for name in names]


def _page(context: dict[str, Any]) -> str:
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
        "facts": _facts,
        "numbers": lambda figure: tables.of_frame(f"Numbers of {figure.name}", figure.table),
    }
    return environment.get_template("report.html.j2").render(**context)


def _shown(value: Any) -> Any:
    """Write out control and bidi characters of a text; leave markup of our own as it is."""
    return visible(value) if type(value) is str else value


def _facts(facts: Mapping[str, Any]) -> str:
    """Return a mapping as one line: ``temperature 0.7, top_p 0.9``; nested values as JSON."""
    return ", ".join(
        f"{name} {value if type(value) is str else json.dumps(value, ensure_ascii=False)}"
        for name, value in facts.items()
    )
