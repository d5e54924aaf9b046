"""Why an estimator cannot be tried on a sequence of a trace, if it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.errors import UsageError

if TYPE_CHECKING:
    from tracekit.trace.reader import Trace
    from tracekit.vocab.layers import LayerChoice
    from tracekit.vocab.others import Others
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Needs


def why_not(scheme: Scheme, trace: Trace, sequence_id: str, others: Others) -> str | None:
    """Return the first reason why a scheme cannot be tried, as half a sentence; None if it can.

    Parameters
    ----------
    scheme
        The scheme.
    trace
        The trace.
    sequence_id
        The sequence.
    others
        Texts of other prompts.

    Raises
    ------
    UsageError
        If it chooses layers that the model does not have.
    """
    for part in scheme.estimator.parts:
        try:
            why = _unmet(part.needs, trace, sequence_id, others)
        except UsageError as error:
            msg = f"estimator {part.text}: {error}"
            raise UsageError(msg) from error
        if why is not None:
            return why
    return None


def _unmet(needs: Needs, trace: Trace, sequence_id: str, others: Others) -> str | None:
    if needs.others and not others.texts:
        return "it is fitted on other prompts, and the trace has none"
    if needs.attention is not None and (why := _unseen(needs.attention, trace, sequence_id)):
        return why
    return None if needs.residual is None else _unrecorded(needs.residual, trace)


def _unseen(choice: LayerChoice, trace: Trace, sequence_id: str) -> str | None:
    layers, stored = trace.spec.layers, trace.stored_layers(sequence_id)
    for layer in choice.numbers(len(layers)):
        if layer not in stored:
            there = f"layers={'/'.join(map(str, stored))}" if stored else "--capture qkv"
            return (
                f"it reads the attention of layer {layer}, whose queries and keys the trace does "
                f"not hold; try {there}"
            )
        choice.heads(layer, len(layers), layers[layer].num_heads)
    return None


def _unrecorded(residual: int, trace: Trace) -> str | None:
    num_layers = len(trace.spec.layers)
    layer = residual + num_layers if residual < 0 else residual
    if not 0 <= layer < num_layers:
        msg = f"layer={residual}: the model has layers 0 to {num_layers - 1}."
        raise UsageError(msg)
    if layer in trace.residual_layers:
        return None
    return f"it reads the hidden states of layer {layer}: record with --hidden-layers {layer}"
