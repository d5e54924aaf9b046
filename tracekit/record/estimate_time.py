"""How long recording takes, before anything is recorded."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from tracekit.model.versions import cache_keyword, new_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.load import LoadedModel
    from tracekit.record.estimate import Length

TIMED_PROMPT, TIMED_STEPS = 64, 6
"""Tokens of the prefill and steps of decoding that are timed."""


def estimate_seconds(
    loaded: LoadedModel, lengths: Sequence[Length], *, num_probes: int = 0
) -> float:
    """Return the time that the model needs for sequences, one at a time, in seconds.

    A short prefill and a few steps are timed, twice, and the faster time counts. Attention's growth
    with the length, deriving and writing are not in it: for contexts of thousands of tokens it is a
    lower bound.
    """
    with torch.no_grad():
        first, second = _time_once(loaded), _time_once(loaded)
    prefill_s, step_s = min(first[0], second[0]), min(first[1], second[1])
    num_prompt = sum(one.num_prompt + _probing_rows(one, num_probes) for one in lengths)
    num_new = sum(one.num_new for one in lengths)
    return num_prompt * prefill_s / TIMED_PROMPT + num_new * step_s


def _probing_rows(one: Length, num_probes: int) -> int:
    """Return the rows of prefill that a sequence's probes are worth.

    All rows once more, then the probed ones forward and, without parameters, as much a probe back.
    """
    return (one.num_rows + one.num_probed * (1 + num_probes)) * bool(one.num_probed)


def _time_once(loaded: LoadedModel) -> tuple[float, float]:
    """Return the time of one short prefill and, on average, of a step after it."""
    model = loaded.model
    cache = {cache_keyword(model): new_cache(model)}
    ids_BT = torch.zeros(1, TIMED_PROMPT, dtype=torch.int64, device=model.device)
    marks = [time.perf_counter()]
    for start in range(TIMED_STEPS + 1):
        # Reading a logit waits for the device.
        output = model(ids_BT if start == 0 else ids_BT[:, :1], use_cache=True, **cache)
        output.logits[0, -1, 0].item()
        marks.append(time.perf_counter())
    return marks[1] - marks[0], (marks[-1] - marks[1]) / TIMED_STEPS
