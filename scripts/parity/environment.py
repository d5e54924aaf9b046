"""A virtual environment for kvpress, made once beside the checkout's own.

kvpress wants a transformers older than tracekit's, so the two never share a process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-kvpress"
KVPRESS = "kvpress==0.5.5"
# What its modules import at once. PEFT, which one press needs, is left out.
PACKAGES = (
    "torch==2.13.0",
    "transformers==5.2.0",
    "numpy>=2,<3",
    "pandas>=2.2.2,<3",
    "accelerate>=1,<2",
    "cachetools>=5.5.2,<6",
    "datasets>=2.21.0",
    "fire>=0.6,<0.7",
)


def kvpress_python() -> Path:
    """Return the Python of the environment, after making it where it is not there or is old."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "kvpress-stamp"
    wanted = "\n".join((KVPRESS, *PACKAGES))
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"setting up {FOLDER} (some minutes and 2 GB, once)", file=sys.stderr)
        if not python.is_file():
            _run(sys.executable, "-m", "venv", "--without-pip", str(FOLDER))
        (FOLDER / ".gitignore").write_text("*\n")
        _install(python, *PACKAGES)
        _install(python, "--no-deps", KVPRESS)
        stamp.write_text(wanted)
    return python


def _install(python: Path, *packages: str) -> None:
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    _run(*pip, "--disable-pip-version-check", "--root-user-action=ignore", *packages)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"{Path(__file__).name}: {' '.join(command[:4])} ... ended with {done.returncode}")


if __name__ == "__main__":
    print(kvpress_python())
