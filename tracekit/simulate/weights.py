"""The parts of a model that candidate sets are made with: from the trace, else from the model."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracekit.errors import TraceError
from tracekit.measure.head import Head
from tracekit.measure.norm import Norm
from tracekit.measure.tensors import to_torch
from tracekit.model.head import head_tensors
from tracekit.vocab.view import Decoder

if TYPE_CHECKING:
    import torch

    from tracekit.progress import Progress
    from tracekit.simulate.recorded_model import RecordedModel
    from tracekit.trace.reader import Trace


class Weights:
    """The head, the final norm and the input embedding of a trace's model.

    Parameters
    ----------
    trace
        The trace.
    model
        Its model, which is loaded if the trace does not hold the head.
    progress
        Told where the head comes from if the trace does not hold it.

    Raises
    ------
    ModelError
        If the model under the trace's name is another one than was recorded.
    """

    def __init__(self, trace: Trace, model: RecordedModel, progress: Progress) -> None:
        self._trace, self._model, self._progress = trace, model, progress

    @cached_property
    def head(self) -> Head:
        """The language-model head."""
        if self._trace.has_head:
            return Head.load(self._trace.weights_path, self._trace.spec.head)
        self._progress.say(
            f"the trace was recorded with --head omit: reading it from {self._model.name}."
        )
        tensors = self._of_model
        return Head(tensors["head.weight"], tensors.get("head.bias"), self._trace.spec.head)

    @cached_property
    def embedding(self) -> torch.Tensor:
        """The input embedding [V, E]."""
        if self._trace.spec.head.is_tied:
            return self.head.weight_VE
        if self._trace.has_head:
            block = self._trace.embedding()
            return to_torch(block.data, block.dtype)
        weight_VE: torch.Tensor = self._of_model["embedding.weight"]
        return weight_VE

    @cached_property
    def norm(self) -> Norm:
        """The final norm.

        Raises
        ------
        TraceError
            If the trace does not say what it is.
        """
        spec = self._trace.spec.norm
        if spec is None:
            msg = f"{self._trace.path} does not know the model's final norm: record it again."
            raise TraceError(msg)
        if self._trace.has_head:
            return Norm.load(self._trace.weights_path, spec)
        return Norm(self._of_model.get("norm.weight"), self._of_model.get("norm.bias"), spec)

    def decoder(self, pinned_P: torch.Tensor) -> Decoder:
        """Return what estimators may use of the model."""
        return Decoder(
            head=self.head,
            embedding=lambda: self.embedding,
            num_layers=len(self._trace.spec.layers),
            pinned_P=pinned_P.unique(),
        )

    @cached_property
    def _of_model(self) -> dict[str, Any]:
        tensors = head_tensors(self._model.plain.model)
        return {name: tensor.cpu() for name, tensor in tensors.items()}
