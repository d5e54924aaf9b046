"""Why an estimator cannot be tried on a sequence of a trace, if it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracekit.trace.reader import Trace
    from tracekit.vocab.layers import LayerChoice
    from tracekit.vocab.others import Others
    from tracekit.vocab.scheme import Scheme


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
    for needs in (part.needs for part in scheme.estimator.parts):
        if needs.others and not others.texts:
            return "it is fitted on other prompts, and the trace has none"
        if needs.attention is not None and (why := _unseen(needs.attention, trace, sequence_id)):
            return why
        if needs.residual is not None and (why := _unrecorded(needs.residual, trace)):
            return why
    return None


def _unseen(choice: LayerChoice, trace: Trace, sequence_id: str) -> str | None:
    missing = set(choice.numbers(len(trace.spec.layers))) - set(trace.stored_layers(sequence_id))
    if not missing:
        return None
    return (
        f"it reads the attention of layer {min(missing)}, whose queries and keys the trace does not "
        "hold"
    )


def _unrecorded(residual: int, trace: Trace) -> str | None:
    num_layers = len(trace.spec.layers)
    layer = residual + num_layers if residual < 0 else residual
    if not 0 <= layer < num_layers:
        return f"it reads layer {residual}: the model has layers 0 to {num_layers - 1}"
    if layer in trace.residual_layers:
        return None
    return f"it reads the hidden states of layer {layer}: record with --hidden-layers {layer}"
