"""Write the generated parts of README.md, or check that they are fresh.

    python scripts/readme.py [--check]

Generated: the help of each command, and the tables of policies and estimators, between marks like
``<!-- generated: help record -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def output_of(*arguments: str) -> str:
    """Return what a tracekit command prints, in a fixed width and without colour."""
    fixed = {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    program = Path(sys.executable).with_name("tracekit")
    done = subprocess.run(
        [program, *arguments], check=True, capture_output=True, text=True, env=os.environ | fixed
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def generated(what: str) -> str:
    """Return the text of one generated block."""
    kind, *rest = what.split()
    arguments = ["--help"] if what == "help" else [*rest, "--help"] if kind == "help" else [what]
    return f"```text\n$ tracekit {' '.join(arguments)}\n{output_of(*arguments)}\n```\n"


def main() -> None:
    """Rewrite the README, or fail if that would change it."""
    old = README.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda found: found[1] + generated(found[2]) + found[3], old)
    if "--check" not in sys.argv:
        README.write_text(new, encoding="utf-8")
    elif new != old:
        sys.exit("README.md is stale: run python scripts/readme.py")


if __name__ == "__main__":
    main()
