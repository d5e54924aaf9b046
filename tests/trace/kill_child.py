"""Writes small traces in forked children, each killed at a later operation on its files.

    python kill_child.py FOLDER

FOLDER/reference is written without a kill. FOLDER/0, FOLDER/1 ... hold a trace that is being
overwritten, by a child that kills itself at that operation. Printed is how many there were.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.trace.killed import begin, write
from tracekit.trace import writer

WATCHED = ("open", "os.", "shutil.")
"""Audit events of the operations on files that Python itself makes."""


def main() -> None:
    """Write all traces."""
    writer.SHARD_SEQUENCES = 1
    folder = Path(sys.argv[1])
    write(folder / "reference")
    begin(folder / "begun")
    for number in itertools.count():
        out = folder / str(number)
        shutil.copytree(folder / "begun", out)
        child = os.fork()
        if child == 0:
            sys.addaudithook(killer(out, number))
            write(out, overwrite=True)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
    sys.stdout.write(f"{number}\n")


def killer(out: Path, number: int) -> Any:
    """Return an audit hook that kills this process at an operation inside a folder."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event.startswith(WATCHED) and str(out) in str(arguments[0] if arguments else ""):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    return hook


if __name__ == "__main__":
    main()
