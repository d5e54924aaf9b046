"""How much faster decoding can get at most when the head alone gets cheaper (Amdahl's law).

A decoding step of one sequence is bound by the bytes that it reads, and reads each weight once: the
head's share of the bytes is then its share of the time.
"""

from __future__ import annotations

from tracekit.errors import UsageError


def head_share(head_bytes: int, model_bytes: int | None) -> float | None:
    """Return the head's part of the weight bytes that a decoding step reads.

    Parameters
    ----------
    head_bytes
        Bytes of the head's weight and bias (``Head.num_bytes``).
    model_bytes
        Bytes of all weights that a step reads, the head included: of an input embedding that is no
        head, that is one row. None where they are not known.

    Returns
    -------
    float or None
        Above 0 and at most 1; None where ``model_bytes`` is.

    Raises
    ------
    UsageError
        If the head has no bytes, or more than the model.

    Notes
    -----
    KV cache and activations are left out: with them the head's share is smaller, so this is an
    upper bound that gets looser as the context grows. Experts that a token is not sent to are
    counted though they are not read: in a mixture of experts the head's share is larger than this.
    """
    if model_bytes is None:
        return None
    if not 0 < head_bytes <= model_bytes:
        msg = (
            f"a head of {head_bytes} bytes cannot be part of a model of {model_bytes}: "
            f"give the bytes of all weights, the head included."
        )
        raise UsageError(msg)
    return head_bytes / model_bytes


def ceiling(share: float, cost_frac: float = 0.0) -> float:
    """Return how many times faster a step gets if the head costs a fraction of what it did.

    Parameters
    ----------
    share
        The head's part of a step's cost, from 0 to below 1 (``head_share``).
    cost_frac
        What the head costs afterwards, of its own cost before: estimator and candidates together.
        At 0 the head is free: the bound that no pruning passes.

    Returns
    -------
    float
        1 / (1 - share * (1 - cost_frac)): 1 is no gain, below 1 a loss.

    Raises
    ------
    UsageError
        If ``share`` is not from 0 to below 1, or ``cost_frac`` is below 0.

    Notes
    -----
    For one sequence at a time. In a batch the weights are read once for all, and computing comes
    into it.
    """
    if not 0 <= share < 1:
        msg = f"the head's share is {share:g}: give a number from 0 to below 1."
        raise UsageError(msg)
    if not cost_frac >= 0:
        msg = f"the head's cost is {cost_frac:g} of its own: give 0 or more."
        raise UsageError(msg)
    return 1 / (1 - share * (1 - cost_frac))
