"""What a fitted budget gains on sequences that it was not fitted on, all layers pruned together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tracekit.kv.budget import Cache
from tracekit.live.driver import drive
from tracekit.live.layer_rule import PolicyRule
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.measure.stats import MIN_SEQUENCES, Interval, paired_difference
from tracekit.progress import Progress, Silent
from tracekit.simulate.fit_budget import Fit, fit_budget, write_budget
from tracekit.simulate.question import seed_of
from tracekit.simulate.rerun import rerun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import pandas as pd

    from tracekit.kv.policy import Policy
    from tracekit.live.pruned import Scores
    from tracekit.model.load import LoadedModel
    from tracekit.trace.reader import Trace


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a fitted budget changed on sequences that it was not fitted on.

    Parameters
    ----------
    fit
        The budget.
    text
        Policy that reads it.
    difference
        KL in nats a token, fitted minus uniform, all layers pruned: below 0 is a gain.
    uniform_kl_nats
        Mean KL under the uniform budget; None without sequences.
    held_out
        Their ids.
    """

    fit: Fit
    text: str
    difference: Interval
    uniform_kl_nats: float | None
    held_out: tuple[str, ...]

    @property
    def message(self) -> str:
        """What may be said of it, in a sentence."""
        n, change = self.difference.n, self.difference
        if change.mean is None or self.uniform_kl_nats is None:
            return "The fitted budget was tried on no other sequence: nothing is known of its gain."
        what = f"KL {change.mean:+.3g} nats a token against uniform's {self.uniform_kl_nats:.3g}"
        on = f"on {n} held-out sequences, fitted on {self.fit.num_sequences}"
        if change.low is None or change.high is None:
            return f"{what} {on}: fewer than {MIN_SEQUENCES} give no interval, no gain is claimed."
        verdict = "a gain" if change.high < 0 else "a loss" if change.low > 0 else "undecided"
        return f"{what} [{change.low:+.3g}, {change.high:+.3g}] {on}: {verdict}."


def split(sequence_ids: Iterable[str], seed: int) -> tuple[list[str], list[str]]:
    """Return the half to fit on, the larger one, and the half to try on, drawn by a seed."""
    names = sorted(set(sequence_ids))
    drawn = [names[place] for place in np.random.default_rng(seed).permutation(len(names))]
    middle = (len(drawn) + 1) // 2
    return sorted(drawn[:middle]), sorted(drawn[middle:])


def fit_and_try(
    trace: Trace,
    loaded: LoadedModel,
    rows: pd.DataFrame,
    file: Path,
    *,
    kept_frac: float,
    family: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Gain:
    """Fit a budget on half of the swept sequences, write it, and measure its gain on the others.

    Parameters
    ----------
    trace, loaded
        The trace and its model.
    rows
        Of ``schema.LAYER_RESULTS``, all swept sequences.
    file
        Where the budget goes; see ``write_budget``.
    kept_frac, family
        See ``fit_budget``.
    seed
        Of the split, of random policies and of the bootstrap.
    progress
        Told of each sequence that it is tried on.
    """
    progress = progress or Silent()
    fitting, held_out = split(rows["sequence_id"].astype(str), seed)
    cache = Cache(tuple(one for one in loaded.spec.layers if one.holds_keys))
    chosen = rows[rows["sequence_id"].isin(fitting)]
    fit = fit_budget(chosen, cache, family, kept_frac=kept_frac)
    about = {
        "run_id": trace.manifest["run_id"],
        "model": loaded.spec.name,
        "fingerprint": loaded.spec.fingerprint,
        "seed": seed,
        "fitted_on": fitting,
        "held_out": held_out,
    }
    fitted = write_budget(fit, file, cache, about)
    progress.start("trying the budget", len(held_out), "sequences")
    kls = []
    for name in held_out:
        kls.append(_propagated_kl(trace, loaded, name, (fit.policy, fitted), seed))
        progress.advance()
    uniform_S, fitted_S = np.array(kls, dtype=np.float64).reshape(-1, 2).T
    measured_S = uniform_S[~np.isnan(uniform_S)]
    return Gain(
        fit=fit,
        text=fitted.text,
        difference=paired_difference(fitted_S, uniform_S, seed=seed),
        uniform_kl_nats=float(measured_S.mean()) if measured_S.size else None,
        held_out=tuple(held_out),
    )


def _propagated_kl(
    trace: Trace, loaded: LoadedModel, name: str, policies: Sequence[Policy], seed: int
) -> list[float]:
    """Return the KL of policies of one schedule on a sequence; NaN if it has no such point."""
    rows = trace.sequences
    sequence = rows[rows["sequence_id"] == name].iloc[0]
    again = rerun(trace, loaded, sequence, seed=seed_of(sequence, seed))
    point = None if again is None else PolicyRule(policies[0]).point(again.setting.spans)
    scored = None if again is None or point is None else again.scored(point)
    if again is None or scored is None:
        return [np.nan] * len(policies)
    kls: list[float] = []
    scores: Scores = {}
    for policy in policies:
        family = planned(again.run, [policy], again.setting)
        pruned = Pruned(again.run, family, again.setting, scores=scores)
        hidden_1RE = drive(again.run, pruned, pruned.first_row, first_layer=pruned.first_layer)
        kls.append(float(scored.compare(hidden_1RE[0]).kl_nats.mean()))
    return kls
