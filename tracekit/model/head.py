"""The language-model head: its weights for the trace, its scale and soft-cap for the spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tracekit.errors import ModelError
from tracekit.model.decoder import decoder_of
from tracekit.spec import HeadSpec

if TYPE_CHECKING:
    from tracekit.model.tap import ForwardEnd

HEAD_GATES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
"""Largest difference between recomputed and real logits, relative to the largest logit."""

_NORM_NAMES = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f", "final_norm")
"""Names of the decoder's last norm, the commonest first."""


def head_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors from which logits, and what belongs to them, are derived offline.

    Parameters
    ----------
    model
        A loaded model.

    Returns
    -------
    dict
        ``head.weight`` [V, E]; ``head.bias`` [V] where there is one; ``norm.weight`` and
        ``norm.bias`` [E] of the final norm where it is found; ``embedding.weight`` [V, E] if the
        head is not tied to it. The model's own tensors, detached, not copied.

    Raises
    ------
    ModelError
        If the head's weight is packed or quantised.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not head.weight.is_floating_point():
        msg = f"the head's weight is packed as {head.weight.dtype}; load the model without quantisation."
        raise ModelError(msg)
    norm = final_norm(model)
    found = {
        "head.weight": head.weight,
        "head.bias": getattr(head, "bias", None),
        "norm.weight": getattr(norm, "weight", None),
        "norm.bias": getattr(norm, "bias", None),
        "embedding.weight": None if _is_tied(model) else embedding.weight,
    }
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def final_norm(model: Any) -> Any | None:
    """Return the module between the last layer and the head; None if it has no known name."""
    decoder = decoder_of(model)
    norms = (getattr(decoder, name, None) for name in _NORM_NAMES)
    return next((one for one in norms if one is not None), None)


def read_head(model: Any, end: ForwardEnd) -> HeadSpec:
    """Return the spec of a model's head, after it gave the logits of one forward pass.

    Parameters
    ----------
    model
        A loaded model.
    end
        A pass whose logits cover all its positions.

    Raises
    ------
    ModelError
        If logits recomputed from the hidden states differ from the model's.
    """
    tensors, config = head_tensors(model), model.config.get_text_config(decoder=True)
    weight = tensors["head.weight"]
    spec = HeadSpec(
        num_rows=weight.shape[0],
        hidden_size=weight.shape[1],
        has_bias="head.bias" in tensors,
        scale=_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        is_tied=_is_tied(model),
    )
    hidden = end.hidden_BTE.to(weight)
    logits = spec.scale * functional.linear(hidden, weight, tensors.get("head.bias")).double()
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    real = end.logits_BTV.to(logits)
    error = float((logits - real).abs().max() / real.abs().max())
    gate = HEAD_GATES[str(weight.dtype).removeprefix("torch.")]
    if not error <= gate:
        msg = (
            f"logits recomputed from hidden states are off by {error:.1e} (relative, at most "
            f"{gate:.0e} allowed): the head of {config.model_type} is not a product, a scale and a cap."
        )
        raise ModelError(msg)
    return spec


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _scale(config: Any) -> float:
    """Return the factor on logits: Cohere's, Falcon H1's, or one over Granite's."""
    for name in ("logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    return 1.0 if divisor is None else 1.0 / divisor
