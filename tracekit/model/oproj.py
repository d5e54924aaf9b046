"""The output projections: the matrix of each layer that reads its attention, found by watching.

On a probe pass the one module counts whose input is the attention output with its heads joined, and
whose own output is W o + b. Names and classes are not asked, and a gate in between is noticed.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import align_module_device
from torch.nn import functional

from tracekit.model.decoder import decoder_of
from tracekit.model.head import HEAD_GATES
from tracekit.model.probe import probe_ids, watch

if TYPE_CHECKING:
    from tracekit.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class Projection:
    """The output projection of a layer: W o + b, with o the attention output, its heads joined.

    Parameters
    ----------
    weight
        W [E, H * D'], in the model's own type; head h is read by columns h * D' to (h + 1) * D'.
    bias_E
        b [E], or None.
    """

    weight: torch.Tensor
    bias_E: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class _Use:
    """What went into a module that has a matrix, and what came out."""

    module: Any
    given: torch.Tensor
    output: torch.Tensor

    def reads(self, joined_BQN: torch.Tensor) -> bool:
        """Return whether the input is this attention output, bit for bit."""
        if self.given.numel() != joined_BQN.numel() or self.given.shape[-1] != joined_BQN.shape[-1]:
            return False
        return torch.equal(joined_BQN.reshape(self.given.shape).to(self.given), self.given)


def output_projections(model: Any, spec: ModelSpec) -> dict[int, Projection]:
    """Return the output projections by layer, of layers whose attention can be replayed.

    Parameters
    ----------
    model
        A loaded model.
    spec
        As read from it. That a layer is not refused also means that nothing wrote into its
        attention output afterwards.

    Returns
    -------
    dict
        A layer is missing where no matrix, or more than one, reads its attention as it is (a gate
        or a norm is in between, adapters run beside it), or where that matrix is packed. Tensors
        are the model's own where they can be, detached; nothing may be written into them.
    """
    uses: list[_Use] = []
    with ExitStack() as stack:
        for module in decoder_of(model).modules():
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
                stack.callback(module.register_forward_hook(_keeper(uses)).remove)
        seen = watch(model, probe_ids(model.config.get_text_config(decoder=True)))
    found = {}
    for layer in spec.layers:
        if not layer.num_heads or layer.refusal is not None:
            continue
        joined_BQN = seen.of(layer.index)[0].output_BQHD.flatten(2)
        readers = [use for use in uses if use.reads(joined_BQN)]
        projection = _projection(readers[0]) if len(readers) == 1 else None
        if projection is not None:
            found[layer.index] = projection
    return found


def _keeper(uses: list[_Use]) -> Any:
    """Return a hook that keeps each use of a module with one tensor in and one out."""

    def keep(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if len(args) == 1 and torch.is_tensor(args[0]) and torch.is_tensor(output):
            uses.append(_Use(module, args[0], output))

    return keep


def _projection(use: _Use) -> Projection | None:
    """Return the matrix of a module as W, which GPT-2 keeps transposed; None if it is not W o + b."""
    # What is left on disk is there only inside.
    with align_module_device(use.module):
        weight, bias = use.module.weight.detach(), getattr(use.module, "bias", None)
        bias_E = None if bias is None else bias.detach()
    gate = HEAD_GATES.get(str(weight.dtype).removeprefix("torch."))
    if gate is None:
        return None  # packed
    candidates = [Projection(one, bias_E) for one in (weight, weight.T)]
    errors = [_error(use, one) for one in candidates]
    best = min(errors)
    return candidates[errors.index(best)] if best <= gate else None


def _error(use: _Use, projection: Projection) -> float:
    """Return how far W o + b is from the module's own output, relative to its largest number."""
    weight, bias_E = projection.weight, projection.bias_E
    if weight.shape != (use.output.shape[-1], use.given.shape[-1]):
        return torch.inf
    given = use.given.to(weight)
    own = use.output.to(weight).double()
    wide_E = None if bias_E is None else bias_E.double()
    ours = functional.linear(given.double(), weight.double(), wide_E)
    # A projection of zeros has no size to compare with.
    return float((ours - own).abs().max() / own.abs().max().clamp_min(torch.finfo(own.dtype).tiny))
