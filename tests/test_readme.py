"""The README's queries run as they stand there, on a trace of the tiny model."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    text = README.read_text(encoding="utf-8")
    return [body for name, body in _FENCE.findall(text) if name == language]


def reads_parquet_only(code: str) -> bool:
    """Whether a block reads ``demo-trace`` with pandas or pyarrow, without tracekit."""
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    return bool(names & {"pandas", "pyarrow"}) and "tracekit" not in names


SQL = blocks("sql")
PYTHON = [code for code in blocks("python") if reads_parquet_only(code)]


@pytest.fixture
def beside_trace(tmp_path: Path, trace_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder that holds ``demo-trace`` the current one."""
    (tmp_path / "demo-trace").symlink_to(trace_folder)
    monkeypatch.chdir(tmp_path)


def last_value(code: str) -> Any:
    """Run a block and return the value of its last line."""
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "README.md", "exec"), names)  # noqa: S102 our own README
    return eval(compile(ast.Expression(last.value), "README.md", "eval"), names)


def test_the_readme_has_queries_of_both_kinds() -> None:
    assert (len(SQL), len(PYTHON)) >= (3, 2)


@pytest.mark.usefixtures("beside_trace")
@pytest.mark.parametrize("number", range(len(SQL)))
def test_each_sql_query_of_the_readme_gives_rows(number: int) -> None:
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        assert connection.sql(SQL[number]).fetchall()


@pytest.mark.usefixtures("beside_trace")
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_pandas_snippet_of_the_readme_gives_a_table(number: int) -> None:
    assert not last_value(PYTHON[number]).isna().all(axis=None)
