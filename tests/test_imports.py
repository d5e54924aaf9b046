"""What is imported when: the command line starts fast, and a report is read without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "matplotlib", "pandas")


def loaded_after(code: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has loaded after some code."""
    check = f"{code}\nimport sys\nprint(' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


def test_help_imports_nothing_heavy() -> None:
    code = (
        "from tracekit.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\nprint()"
    )
    assert loaded_after(code) == set()


@pytest.mark.parametrize("module", ["tracekit.trace.reader", "tracekit.trace.validate"])
def test_a_trace_is_read_without_torch(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"torch", "transformers"}


def test_importing_the_package_imports_nothing() -> None:
    assert loaded_after("import tracekit") == set()


def test_public_names_are_there() -> None:
    import tracekit

    for name in tracekit.__all__:
        assert getattr(tracekit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tracekit.nothing  # noqa: B018 the access is the test
