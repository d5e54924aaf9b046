"""What a scorer is: a rule that gives each key a number, and the presets that are built on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tracekit.registry import Registry

if TYPE_CHECKING:
    import torch

    from tracekit.kv.accumulate import Accumulator
    from tracekit.kv.view import View


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the engine must provide to a scorer or a budget; the view refuses anything else.

    Parameters
    ----------
    keys, values
        Keys and values themselves, evicted ones included.
    queries
        Queries of all rows so far.
    accumulated
        What is summed up over all rows so far.
    last_queries
        Queries of this many newest rows, and their attention to the keys that are held now.
    future
        Rows that come after the decision. No decoder has them: such a rule is a bound.
    influence
        Gradients of recorded influence probes at these rows; with ``future``.
    """

    keys: bool = False
    values: bool = False
    queries: bool = False
    accumulated: tuple[Accumulator, ...] = ()
    last_queries: int = 0
    future: bool = False
    influence: bool = False


EVERY_STEP = (("every", "1"), ("from", "prompt"))
"""Schedule of the policies that decide at every step."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published policy: its name, and what goes with the scorer by default.

    Parameters
    ----------
    name
        As users write it.
    scorer
        Name of the scorer; empty in the presets of a scorer's own class.
    sinks
        First positions that stay.
    recent
        Newest positions that stay: an amount as in ``recent=``, or the name of a parameter of the
        scorer whose value is the number of tokens.
    schedule
        Parameters of the schedule.
    items
        Any other parameters, as text: the scorer's, ``layers``, ``heads``, ``positions`` ...
    what
        What is its own, in one sentence without a full stop, where that is not what the scorer's
        first sentence says: in each preset that has more than a scorer and its usual protection.
    """

    name: str
    scorer: str = ""
    sinks: int = 0
    recent: str = "0"
    schedule: tuple[tuple[str, str], ...] = (("at", "prompt"),)
    items: tuple[tuple[str, str], ...] = ()
    what: str = ""


@dataclass(frozen=True)
class Scorer(ABC):
    """Gives each key a score; the keys with the highest stay. Parameters are dataclass fields."""

    presets: ClassVar[tuple[Preset, ...]]
    evicts: ClassVar[bool] = True
    """False if the policy keeps everything, so that there is no amount to choose."""
    causal: ClassVar[bool] = True
    """False if it looks at later rows: a bound, which no decoder equals, never recommended."""

    @property
    def needs(self) -> Needs:
        """What ``score`` reads."""
        return Needs()

    def state_bytes(self, group_size: int) -> int:
        """Return the bytes that the rule itself keeps beside each cache entry of a KV head."""
        return sum(
            one.bytes_per_head * (group_size if one.by_query_head else 1)
            for one in self.needs.accumulated
        )

    @abstractmethod
    def score(self, view: View) -> torch.Tensor:
        """Return the scores of all keys at a decision.

        Parameters
        ----------
        view
            What is known then. Nothing in it depends on later tokens, unless ``needs.future``.

        Returns
        -------
        Tensor
            [N, L, G, K]; higher stays longer. Axes may be 1 where all share a score. Keys that are
            no longer held may have any number, held ones not NaN.
        """


SCORERS: Registry[Scorer] = Registry(
    "scorer", package="tracekit.kv.scorers", group="tracekit.scorers"
)
