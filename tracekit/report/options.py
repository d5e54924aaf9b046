"""What a user asks of a report beside the results."""

from __future__ import annotations

from dataclasses import dataclass

from tracekit.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one report.

    Parameters
    ----------
    memory_bytes
        Memory of the device that is planned for; None: no device, no limit.
    kl_bound_nats
        Propagated KL a token above which a sequence counts as damaged.
    alpha
        Share of prompts that may be damaged.
    delta
        Chance that anything is certified that is wrong about that: it bounds the procedure, not the
        share of wrong ones among what was certified.

    Raises
    ------
    UsageError
        If a number is out of range.
    """

    memory_bytes: float | None = None
    kl_bound_nats: float = 0.1
    alpha: float = 0.1
    delta: float = 0.1

    def __post_init__(self) -> None:
        for name in ("alpha", "delta"):
            value = getattr(self, name)
            if not 0 < value < 1:
                msg = f"--{name} is a share between 0 and 1, unlike {value:g}."
                raise UsageError(msg)
        if not 0 < self.kl_bound_nats < float("inf"):
            msg = f"--kl-bound is a KL in nats a token above 0, unlike {self.kl_bound_nats:g}."
            raise UsageError(msg)
        if self.memory_bytes is not None and not 0 < self.memory_bytes < float("inf"):
            msg = f"--memory is a size above 0, such as 80GiB, unlike {self.memory_bytes:g}."
            raise UsageError(msg)
