"""What to compute: policies and estimators, kept fractions and sizes, and a stable key a cell."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tracekit.errors import UsageError
from tracekit.kv.amounts import parse_kept
from tracekit.kv.parse import parse
from tracekit.measure.conventions import convention_of
from tracekit.measure.influence import BLOCK_ROWS
from tracekit.parameters import LARGEST
from tracekit.registry import unknown
from tracekit.schema import RESULTS_VERSION
from tracekit.simulate.stacking import parts_of
from tracekit.vocab.scheme import Scheme, parse_scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.simulate.layer_plan import Sweep

KV = (
    "full",
    "random",
    "streaming",
    "h2o",
    "tova",
    "snapkv",
    "adakv",
    "knorm",
    "expected",
    "oracle",
    "int4",
)
"""Policies that run when none are named."""

VOCAB = (
    "oracle",
    "random",
    "frequency",
    "previous",
    "neighbours:n=0",
    "ngram",
    "screened",
    "clustered",
    "lowrank",
    "anchors",
    "topic",
    "neighbours:n=0+clustered+screened",
    "neighbours:n=0+clustered@fallback",
    "previous@rate",
)
"""Estimators that run when none are named: those that read what every trace of level qkv holds."""

KEPT = (0.1, 0.25, 0.5, 0.75)
"""What policies keep that name no amount: of the tokens seen."""

SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Candidate-set sizes."""

MOST_BYTES = 16
"""Bytes of the widest number that anybody caches."""

LEVELS = ("local", "predicted", "propagated")
"""Levels of truth that this version computes."""


@dataclass(frozen=True, kw_only=True)
class Inside:
    """How policies are run inside the model.

    Parameters
    ----------
    model
        Where the trace's model is now; None: under the name that the trace knows.
    device
        Where it runs.
    convention
        How next-token distributions are compared: ``tracekit`` or ``llama.cpp``.
    """

    model: str | None = None
    device: str = "auto"
    convention: str = "tracekit"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one simulation computes on every sequence.

    Parameters
    ----------
    families
        KV policies; those of one inner tuple differ in the kept amount alone and share their work.
    schemes, sizes
        Vocabulary estimators, each with what sets its size, and candidate-set sizes.
    attention
        Whether attention statistics are taken.
    sweep
        Rules for one layer at a time; None: layers are not swept.
    levels
        Levels of truth of the KV results, each a row of its own.
    seed
        Of random policies and of the bootstrap.
    bytes_per_number
        Bytes of one number of the cache, for the accounting.
    bandwidths
        Bytes a second of the fast tier and of the slow one, for the time of transfers.
    probe_block
        Rows whose effects are added up before they are squared, at level predicted.
    inside
        How policies are run inside the model, at level propagated.
    calibrate
        Sequences that are run at all three levels, to tell how far an estimate can be trusted.
    """

    families: tuple[tuple[Policy, ...], ...]
    schemes: tuple[Scheme, ...]
    sizes: tuple[int, ...]
    attention: bool = False
    sweep: Sweep | None = None
    levels: tuple[str, ...] = ("local",)
    seed: int = 0
    bytes_per_number: int = 2
    bandwidths: tuple[float, float] | None = None
    probe_block: int = BLOCK_ROWS
    inside: Inside = field(default_factory=Inside)
    calibrate: int | None = None

    @property
    def all_levels(self) -> tuple[str, ...]:
        """Levels that some sequence is run at."""
        return self.levels if self.calibrate is None else tuple(dict.fromkeys(self.levels + LEVELS))

    @property
    def policies(self) -> list[Policy]:
        """All KV policies."""
        return [policy for family in self.families for policy in family]

    def to_json(self) -> dict[str, Any]:
        """Return the plan for ``run.json``."""
        return {
            "kv": [policy.text for policy in self.policies],
            "vocab": [scheme.text for scheme in self.schemes],
            "sizes": list(self.sizes),
            "attention": self.attention,
            "rules": [] if self.sweep is None else [rule.text for rule in self.sweep.rules],
            "heads": self.sweep is not None and self.sweep.heads,
            "levels": list(self.levels),
            "probe_block": self.probe_block,
            "calibrate": self.calibrate,
            "convention": self.inside.convention,
            "kv_bytes": self.bytes_per_number,
            "bandwidths": None if self.bandwidths is None else list(self.bandwidths),
        }

    def key(self, run_id: str, question: str, sequence_id: str, name: str) -> str:
        """Return the key of a cell: a hash of all that its numbers depend on."""
        parts = [RESULTS_VERSION, run_id, question, sequence_id, name, self.seed]
        own = {"propagated": self.inside.convention, "predicted": self.probe_block}
        text = json.dumps([*parts, self.bytes_per_number, own.get(question)])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def make_plan(
    kv: str | Sequence[str] | None = None,
    vocab: str | Sequence[str] | None = None,
    *,
    kept: Sequence[float | str] = KEPT,
    sizes: Sequence[int] = SIZES,
    attention: bool | None = None,
    sweep: Sweep | None = None,
    levels: str | Sequence[str] = ("local",),
    seed: int = 0,
    bytes_per_number: int = 2,
    bandwidths: tuple[float, float] | None = None,
    probe_block: int = BLOCK_ROWS,
    inside: Inside | None = None,
    calibrate: int | None = None,
) -> Plan:
    """Return the plan for policies and estimators given as text.

    Parameters
    ----------
    kv, vocab
        Policies (``h2o:every=16``) and estimators (``lowrank:rank=64``). Naming only one kind runs
        only that kind; naming none runs the default set of both.
    kept
        Amounts kept by the policies that name none: fractions, ``"512tok"``, ``"64MiB"``.
    sizes
        Candidate-set sizes.
    attention
        Whether attention statistics are taken; None: where nothing else is named.
    sweep
        Rules for one layer at a time (``make_sweep``); alone it is all that runs.
    levels
        Levels of truth of the KV results: ``local``, ``predicted``, ``propagated``.
    seed
        Of random policies and of the bootstrap.
    bytes_per_number
        Bytes of one number of the cache, for the accounting.
    bandwidths
        Bytes a second of the fast tier and of the slow one; None: no times of transfers.
    probe_block
        Rows whose effects are added up before they are squared, at level predicted.
    inside
        How policies are run inside the model; None: as usual.
    calibrate
        Sequences that are run at all three levels, whatever ``levels`` says; None: none.

    Raises
    ------
    UsageError
        If a name, a parameter or a level does not exist, or an amount is out of range.
    """
    levels = (levels,) if isinstance(levels, str) else tuple(dict.fromkeys(levels))
    for level in levels:
        if level not in LEVELS:
            raise UsageError(unknown("level", level, list(LEVELS)))
    inside = inside or Inside()
    convention_of(inside.convention)
    if not all(1 <= size <= LARGEST for size in sizes):
        msg = f"candidate-set sizes are 1 to {LARGEST}, unlike {list(sizes)}."
        raise UsageError(msg)
    if not 1 <= bytes_per_number <= MOST_BYTES:
        msg = f"bytes a number are 1 to {MOST_BYTES}, unlike {bytes_per_number}."
        raise UsageError(msg)
    runs_inside = "propagated" in levels or calibrate is not None
    if inside.convention != Inside.convention and not runs_inside:
        msg = f"--convention {inside.convention} reads level propagated: add --level propagated."
        raise UsageError(msg)
    if probe_block < 1:
        msg = f"a probe block of {probe_block} rows is none: give 1 or more."
        raise UsageError(msg)
    if calibrate is not None and calibrate < 1:
        msg = f"a calibration on {calibrate} sequences is none: give 1 or more."
        raise UsageError(msg)
    if seed < 0:
        msg = f"seed={seed} is not a number from 0 on."
        raise UsageError(msg)
    if bandwidths is not None and not all(0 < one < math.inf for one in bandwidths):
        msg = f"bandwidths are finite and above 0, unlike {bandwidths}."
        raise UsageError(msg)
    kv, vocab = ([one] if isinstance(one, str) else one for one in (kv, vocab))
    if kv is None and vocab is None and sweep is None:
        kv, vocab, attention = KV, VOCAB, attention is not False
    if calibrate is not None and not kv:
        msg = "a calibration compares levels of KV policies: name one with --kv."
        raise UsageError(msg)
    families: dict[str, dict[str, Policy]] = {}
    for text in kv or ():
        for policy in _with_kept(parse(text), kept):
            # What is stacked is compared with its parts.
            for one in (policy, *(parts_of(policy) or ())):
                families.setdefault(one.family, {})[one.text] = one
    schemes = {one.text: one for one in map(parse_scheme, vocab or ())}
    return Plan(
        families=tuple(tuple(family.values()) for family in families.values()),
        schemes=tuple(schemes.values()),
        sizes=tuple(sorted(set(sizes))),
        attention=bool(attention),
        sweep=sweep,
        levels=levels,
        seed=seed,
        bytes_per_number=bytes_per_number,
        bandwidths=bandwidths,
        probe_block=probe_block,
        inside=inside,
        calibrate=calibrate,
    )


def _with_kept(policy: Policy, kept: Sequence[float | str]) -> list[Policy]:
    """Return the policy at each amount kept, or as it is where it names its own."""
    if not policy.is_open:
        return [policy]
    return [policy.with_kept(parse_kept(str(amount))) for amount in kept]
