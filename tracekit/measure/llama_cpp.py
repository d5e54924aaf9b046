"""Log-probabilities as llama.cpp's perplexity tool keeps them in its base file: in 16 bits.

Source: ``log_softmax`` of llama.cpp's tools/perplexity/perplexity.cpp, step by step in float32.
``record/kld_file.py`` reads such files.
"""

from __future__ import annotations

import torch

CLAMP_NATS = 16.0
"""A logit so far below the highest is raised to there."""

FLOOR_NATS = -16.0
"""Tokens of the base whose log-probability, as decoded, is not above this leave the KL sum."""

TOP_CODE = 65535


def coded_log_probs(logits_TV: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities after encoding to 16 bits and decoding.

    Parameters
    ----------
    logits_TV
        Logits, float32 [T, V]; -inf is allowed, but each row has a distribution.

    Returns
    -------
    Tensor
        Nats, float32 [T, V], within 1.3e-4 of the log-probability where the logit is within 16 of
        the highest; all others, masked ones included, stand at that clamp. They do not sum to 1.
    """
    peak_T1 = logits_TV.amax(1, keepdim=True)
    clamp_T1 = torch.maximum(logits_TV.amin(1, keepdim=True), peak_T1 - CLAMP_NATS)
    total_T1 = (logits_TV - peak_T1).exp_().sum(1, keepdim=True, dtype=torch.float64)
    floor_T1 = clamp_T1 - peak_T1 - total_T1.log().float()
    scale_T1 = (peak_T1 - clamp_T1) / TOP_CODE
    steps_T1 = 1 / scale_T1
    # Logits that are all alike, or nearly so that float32 has no number of steps, have one code.
    steps_T1.masked_fill_(steps_T1.isinf(), 0)
    code_TV = (logits_TV - clamp_T1).clamp_(min=0).mul_(steps_T1).round_()
    return code_TV.mul_(scale_T1).add_(floor_T1)
