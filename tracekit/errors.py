"""Every error that a user can cause, each with the exit code of the command line.

A message is one sentence: what is wrong, where (file, line, column, layer), what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TracekitError(Exception):
    """Base of all errors that tracekit raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(TracekitError):
    """The command or the call asks for something that does not exist (exit code 2)."""

    exit_code = 2


class InputError(TracekitError):
    """A file, a prompt, a trace or a disk is not as it must be (exit code 3)."""

    exit_code = 3


class TraceError(InputError):
    """A trace folder is damaged, foreign, or of another version (exit code 3)."""


class ModelError(TracekitError):
    """The model cannot give this trace: missing weights, unsupported attention (exit code 4)."""

    exit_code = 4


class CellsFailedError(TracekitError):
    """A run finished, but some of its cells failed (exit code 5)."""

    exit_code = 5


class GateFailedError(TracekitError):
    """A comparison finished, but a condition of its gate holds (exit code 6)."""

    exit_code = 6


class InterruptedRunError(TracekitError):
    """The user stopped the run; what was finished is kept (exit code 130)."""

    exit_code = 130
