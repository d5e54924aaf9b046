"""The model that a trace was recorded with, loaded when it is first needed."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from tracekit.live.run import refuse
from tracekit.model.load import load_model
from tracekit.model.steer import refuse_bypassing

if TYPE_CHECKING:
    from tracekit.model.load import LoadedModel
    from tracekit.progress import Progress
    from tracekit.simulate.plan import Inside
    from tracekit.trace.reader import Trace


class RecordedModel:
    """The model of a trace.

    Parameters
    ----------
    trace
        The trace.
    inside
        Where the model is and where it runs.
    progress
        Told what takes long.
    """

    def __init__(self, trace: Trace, inside: Inside, progress: Progress) -> None:
        self._trace, self._inside, self._progress = trace, inside, progress

    @property
    def name(self) -> str:
        """Where the model is: as the user says, or under the name that the trace knows."""
        return self._inside.model or self._trace.spec.name

    @cached_property
    def plain(self) -> LoadedModel:
        """The model, whatever can be run inside it.

        Raises
        ------
        InputError
            If there is no such model.
        ModelError
            If what is found there is another one.
        """
        spec = self._trace.spec
        loaded = load_model(
            self.name, dtype=spec.dtype, device=self._inside.device, say=self._progress.say
        )
        loaded.require(spec)
        return loaded

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, where eviction can be run inside it.

        Raises
        ------
        InputError
            If there is no such model.
        ModelError
            If what is found there is another one, or eviction cannot be run inside it.
        """
        loaded = self.plain
        refuse(loaded)
        refuse_bypassing(loaded.model)
        return loaded
