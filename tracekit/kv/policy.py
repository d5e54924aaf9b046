"""A policy: scorer x protection x budget x schedule, and what it is stacked with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tracekit.errors import UsageError
from tracekit.kv.amounts import Amount, Frac
from tracekit.kv.budgets.uniform import UniformHeads, UniformLayers
from tracekit.kv.text import canonical, short

if TYPE_CHECKING:
    from tracekit.kv.budget import Cache, HeadBudget, LayerBudget
    from tracekit.kv.schedule import Schedule, Spans
    from tracekit.kv.scorer import Scorer
    from tracekit.kv.select import Protection
    from tracekit.kv.selector import Selector
    from tracekit.kv.tier import Tier
    from tracekit.kv.transform import Transform

Positions = Literal["original", "cache"]
"""Where a kept key stands: at its place in the text, or at its place in the cache."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which entries of a KV cache stay, when that is decided, how they are stored and read.

    Parameters
    ----------
    name
        Name of the preset that it was made from.
    scorer
        Gives each key a number.
    protection
        Keys that stay whatever their score.
    schedule
        When decisions are made.
    kept
        Entries to keep, of the tokens seen at each decision, protected ones included, rounded
        down, at least 1; None if not said yet.
    layers, heads
        How they are shared out over layers, and over the heads of a layer.
    positions
        Where kept keys stand: ``cache`` turns them to their place in the cache at each decision.
    transform
        How entries are stored; None: as they are.
    selector
        What each row reads; None: all that is held.
    tier
        A fast tier over a slow one, for what the selector reads; None: one tier.

    Raises
    ------
    UsageError
        If an amount is given to a policy that keeps everything, if keys of heads of unequal length
        should stand at their place in the cache, if a budget that looks at all layers should evict
        inside the prompt, or if a tier has no selector.
    """

    name: str
    scorer: Scorer
    protection: Protection
    schedule: Schedule
    kept: Amount | None = None
    layers: LayerBudget = field(default_factory=UniformLayers)
    heads: HeadBudget = field(default_factory=UniformHeads)
    positions: Positions = "original"
    transform: Transform | None = None
    selector: Selector | None = None
    tier: Tier | None = None

    def __post_init__(self) -> None:
        if not self.scorer.evicts and self.kept != Frac(1.0):
            msg = f"{self.name} keeps everything: leave kept out."
            raise UsageError(msg)
        if self.positions == "cache" and not self.heads.is_uniform:
            msg = "positions=cache needs heads of one length: leave heads out."
            raise UsageError(msg)
        if self.schedule.evict_prompt is not None and self.layers.looks:
            msg = (
                "a budget that looks at all layers is planned when the prompt has been read: leave "
                "evict-prompt out, or choose another layers=."
            )
            raise UsageError(msg)
        if self.tier is not None and self.selector is None:
            msg = "a tier holds what a selector reads: add one, such as +quest:read=0.1."
            raise UsageError(msg)

    @property
    def text(self) -> str:
        """Canonical text, every parameter written; ``parse`` gives an equal policy back."""
        return canonical(self)

    @property
    def family(self) -> str:
        """Short name, the same for all amounts: the name and what differs from its preset."""
        return short(self)

    @property
    def causal(self) -> bool:
        """Whether a decoder could do it; if not it is a bound, never recommended."""
        return self.scorer.causal and (self.selector is None or self.selector.causal)

    @property
    def is_plain(self) -> bool:
        """Whether attention reads what was written of all that is held, nothing else."""
        return self.positions == "original" and self.transform is None and self.selector is None

    @property
    def evicts_only(self) -> bool:
        """Whether it does nothing where it evicts nothing; ``full`` alone does nothing by design."""
        return self.scorer.evicts and self.is_plain

    @property
    def is_open(self) -> bool:
        """Whether an amount is still to be said."""
        return self.kept is None or (self.selector is not None and self.selector.is_open)

    def with_kept(self, kept: Amount) -> Policy:
        """Return the policy that keeps this amount; where nothing is evicted, a selector reads it.

        Raises
        ------
        UsageError
            If the policy has no amount, or two to be said.
        """
        selector = self.selector
        if selector is None or not selector.is_open:
            return replace(self, kept=kept)
        if self.kept is None:
            msg = f"{self.family} keeps and reads: say how much is read, as in +quest:read=0.1."
            raise UsageError(msg)
        return replace(self, selector=replace(selector, read=kept))

    def target_frac(self, spans: Spans, cache: Cache) -> float | None:
        """Return the fraction asked for; of tokens, the mean over decisions of kept / seen.

        Where nothing is evicted it is what the selector was asked to read. None if no amount was
        said, or if nothing is decided: the sequence has no eviction point, or no row after it (its
        last token never enters the cache).
        """
        reads = self.selector is not None and not self.scorer.evicts
        amount = self.selector.read if self.selector is not None and reads else self.kept
        point = self.schedule.point(spans)
        if amount is None or point is None:
            return None
        decisions = self.schedule.decisions(point, spans)
        shares = [cache.share(amount, seen) for seen in decisions]
        return sum(shares) / len(shares) if shares else None
