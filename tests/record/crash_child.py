"""Imports and loads once, then records in a forked child for each line read from standard input.

    python crash_child.py MODEL PROMPTS NEW_TOKENS

A line is a JSON list: the folder of a trace, and the seconds after which the child is killed, or
null. Printed is how it ended: its exit code, or minus the number of the signal.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from typing import Any

import torch

from tracekit.model.load import load_model
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.trace import writer


def main() -> None:
    """Serve until standard input ends."""
    model, prompts, new_tokens = sys.argv[1:]
    # More threads would not live on in a forked child.
    torch.set_num_threads(1)
    writer.SHARD_SEQUENCES = 2
    loaded = load_model(model)
    options = RecordOptions(max_new_tokens=int(new_tokens), capture="influence")
    tell("ready")
    for line in sys.stdin:
        out, kill_after_s = json.loads(line)
        child = os.fork()
        if child == 0:
            sys.excepthook = leave
            record(loaded, prompts, out, options)
            os._exit(0)
        tell(ended(child, kill_after_s))


def ended(child: int, kill_after_s: float | None) -> int:
    """Wait for a child, kill it when its time is over, and return how it ended."""
    deadline = math.inf if kill_after_s is None else time.monotonic() + kill_after_s
    while True:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = math.inf
        time.sleep(0.001)


def leave(*error: Any) -> None:
    """End a child that failed at once, so that it does not read the parent's lines."""
    traceback.print_exception(*error)
    os._exit(1)


def tell(what: object) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
