"""What a scorer is: a rule that gives each key a number, and the presets that are built on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tracekit.registry import Registry

if TYPE_CHECKING:
    import torch

    from tracekit.kv.view import View

Reduce = Literal["mean", "max", "sum"]
"""How numbers of the query heads that share a KV head become one."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the engine must compute for a scorer; the view refuses anything else.

    Parameters
    ----------
    keys
        The keys themselves.
    attention_sum
        Attention that each key has received from all rows so far, each row reduced over the query
        heads of a KV head in this way.
    last_queries
        Attention of this many newest rows to the keys that are held now.
    """

    keys: bool = False
    attention_sum: Reduce | None = None
    last_queries: int = 0


EVERY_STEP = (("every", "1"), ("from", "prompt"))
"""Schedule of the policies that decide at every step."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published policy: its name, and what goes with the scorer by default.

    Parameters
    ----------
    name
        As users write it.
    sinks
        First positions that stay.
    recent
        Newest positions that stay: an amount as in ``recent=``, or the name of a parameter of the
        scorer whose value is the number of tokens.
    schedule
        Parameters of the schedule.
    """

    name: str
    sinks: int = 0
    recent: str = "0"
    schedule: tuple[tuple[str, str], ...] = (("at", "prompt"),)


@dataclass(frozen=True)
class Scorer(ABC):
    """Gives each key a score; the keys with the highest stay. Parameters are dataclass fields."""

    presets: ClassVar[tuple[Preset, ...]]
    evicts: ClassVar[bool] = True
    """False if the policy keeps everything, so that there is no amount to choose."""
    state_bytes_per_entry: ClassVar[int] = 0
    """Bytes that the rule itself must keep beside each cache entry of a KV head."""

    @property
    def needs(self) -> Needs:
        """What ``score`` reads."""
        return Needs()

    @abstractmethod
    def score(self, view: View) -> torch.Tensor:
        """Return the scores of all keys at a decision.

        Parameters
        ----------
        view
            What is known then. Nothing in it depends on later tokens.

        Returns
        -------
        Tensor
            [N, L, G, K]; higher stays longer. Axes may be 1 where all share a score. Keys that are
            no longer held may have any number, held ones not NaN.
        """


SCORERS: Registry[Scorer] = Registry(
    "scorer", package="tracekit.kv.scorers", group="tracekit.scorers"
)
