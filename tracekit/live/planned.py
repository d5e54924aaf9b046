"""The layer budgets of policies, planned from the prompt as the model ran it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tracekit.kv.plan import make_shares, observe
from tracekit.kv.replay import Family

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Setting
    from tracekit.live.run import FullRun


def planned(run: FullRun, policies: Sequence[Policy], setting: Setting) -> Family:
    """Return policies as a family, the shares of its layer budget planned over all layers.

    Parameters
    ----------
    run
        The sequence under the full cache.
    policies
        Policies that differ in their amount alone.
    setting
        Where the sequence has its parts; its ``layers`` play no part.

    Raises
    ------
    UsageError
        If the plan misses a parameter.
    InputError
        If what is observed is not a number, or a file that the plan reads is not as it must be.
    """
    first = policies[0]
    layers = setting.cache.layers if first.layers.looks else ()
    seen = [
        observe(first, run.references[one.index], replace(setting, layers=(one.index,)))
        for one in layers
    ]
    return Family(tuple(policies), make_shares(policies, seen, setting))
