"""The final norm, read by watching: of all norms that it may be, the one that gives what it gives."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import align_module_device

from tracekit.errors import ModelError
from tracekit.measure.norm import Norm
from tracekit.model.head import final_norm
from tracekit.model.resume import decoder_layers
from tracekit.spec import NormSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.model.probe import Seen
    from tracekit.spec import ModelSpec, NormKind

NORM_GATES = {"float64": 1e-5, "float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error of a recomputed norm, relative to its largest number; norms compute in float32."""

SMALL_RMS = 1e-3
"""Size of states in which eps is seen: their mean square is of its order."""

_KINDS: tuple[NormKind, ...] = ("rms", "layer")
_EPS_NAMES = ("variance_epsilon", "eps", "layer_norm_epsilon", "norm_eps", "epsilon")
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12)


def last_layer(model: Any) -> tuple[int, ...]:
    """Return the number of the last layer; nothing if there is no telling which modules are layers."""
    try:
        return (len(decoder_layers(model)) - 1,)
    except ModelError:
        return ()


def read_norm(model: Any, seen: Seen) -> NormSpec | None:
    """Return the norm between the last layer and the head.

    Parameters
    ----------
    model
        A loaded model.
    seen
        A pass in which the residual of ``last_layer`` was seen.

    Returns
    -------
    NormSpec or None
        The one that comes nearest to the head's input on the hidden states that left the last layer,
        and to the module itself on the same states made small, where eps is seen; None if none comes
        near, so also where something else than a norm stands in between.
    """
    module, real_BTE = final_norm(model), seen.end.hidden_BTE
    states = [seen.residuals[layer] for layer in last_layer(model)]
    if module is None or not states or states[0].shape != real_BTE.shape:
        return None
    state_BTE = states[0]
    small_BTE = state_BTE * (SMALL_RMS / state_BTE.float().pow(2).mean().sqrt()).to(state_BTE)
    with torch.no_grad():
        small = module(small_BTE)
    pairs = [(state_BTE, real_BTE), (small_BTE, small)]
    # What is left on disk is there only inside, and goes when the module has run.
    with torch.no_grad(), align_module_device(module):
        norms = list(_candidates(module))
        errors = [max(_error(norm, *pair) for pair in pairs) for norm in norms]
    best = min(errors)
    gate = NORM_GATES[str(model.dtype).removeprefix("torch.")]
    return norms[errors.index(best)].spec if best <= gate else None


def refuse_residuals(spec: ModelSpec) -> None:
    """Refuse a model whose layers' hidden states could not be turned into logits later.

    Raises
    ------
    ModelError
        If its final norm is not understood.
    """
    if spec.norm is None:
        msg = (
            f"what stands between the last layer and the head of {spec.name} ({spec.model_type}) is no "
            "norm that is understood, so its layers' hidden states give no logits; leave out "
            "--hidden-layers."
        )
        raise ModelError(msg)


def _candidates(module: Any) -> Iterator[Norm]:
    """Yield what a norm with these weights may be, the likeliest eps first."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    named = [getattr(module, name, None) for name in _EPS_NAMES]
    known = [float(eps) for eps in named if eps is not None]
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    choices = product(dict.fromkeys([*known, *_USUAL_EPS]), _KINDS, offsets, (False, True))
    for eps, kind, offset, rounds_first in choices:
        spec = NormSpec(
            kind=kind,
            eps=eps,
            weight_offset=offset,
            has_weight=weight is not None,
            has_bias=bias is not None,
            rounds_first=rounds_first,
        )
        yield Norm(weight, bias, spec)


def _error(norm: Norm, given: torch.Tensor, real: torch.Tensor) -> float:
    """Return how far a norm is from the real one, relative to the real one's largest number."""
    real = real.double()
    error = (norm.apply(given).to(real) - real).abs().max() / real.abs().max()
    return float(error.nan_to_num(torch.inf))
