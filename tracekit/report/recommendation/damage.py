"""Which prompts a policy damages, by a loss: the matrix that a recommendation is judged on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from tracekit import schema
from tracekit.report.verdict.prompts import prompt_of

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

LEVEL = "propagated"
"""The level of truth that a recommendation stands on."""

PARTS = 3
"""Every third prompt chooses, the others judge."""

_MEANS = ("kept_frac", "kv_bytes", "full_kv_bytes")
_ANY = ("is_clipped", "is_clamped")


@dataclass(frozen=True, eq=False, kw_only=True)
class Damage:
    """What C policies do to P prompts, at level propagated; a prompt is as bad as its worst sequence.

    Parameters
    ----------
    policies, families
        Canonical texts and short names of those that a decoder can have, that free memory and were
        run on every sequence.
    prompts, domains
        Names, domain by domain, in the order of recording within each.
    is_damaged_CP
        Whether any sequence of the prompt is; one in which nothing was evicted is not.
    severity_CP
        KL in nats a token, the largest over sequences; 0 where nothing was evicted.
    kept_frac_CP, kv_bytes_CP, full_kv_bytes_CP
        Measured, mean over the sequences of a prompt.
    is_idle_CP
        Nothing was evicted in any of its sequences.
    is_clipped_CP, is_clamped_CP
        Some of its sequences are flagged so.
    num_bounds, num_selecting, num_incomplete
        Policies left out: look ahead, free no memory, lack a sequence.
    num_prompts_without
        Recorded prompts to which the loss does not apply, or that have no results at this level.
    """

    policies: tuple[str, ...]
    families: tuple[str, ...]
    prompts: tuple[str, ...]
    domains: tuple[str, ...]
    is_damaged_CP: np.ndarray
    severity_CP: np.ndarray
    kept_frac_CP: np.ndarray
    kv_bytes_CP: np.ndarray
    full_kv_bytes_CP: np.ndarray
    is_idle_CP: np.ndarray
    is_clipped_CP: np.ndarray
    is_clamped_CP: np.ndarray
    num_bounds: int
    num_selecting: int
    num_incomplete: int
    num_prompts_without: int

    @property
    def is_choosing_P(self) -> np.ndarray:
        """Which prompts choose, one in three; the others judge."""
        numbers_P = np.arange(len(self.prompts))
        return np.asarray(numbers_P % PARTS == PARTS - 1)


def kl_damage(results: Results, options: Options) -> Damage:
    """Return the prompts whose propagated KL lies above the bound.

    Parameters
    ----------
    results
        Of any levels; only rows of level propagated are read.
    options
        ``kl_bound_nats`` is the bound.

    Returns
    -------
    Damage
        Without propagated results it has no prompts.
    """
    rows = _rows(results)
    is_damaged = rows["kl_nats"].astype(float) > options.kl_bound_nats
    return _damage(results, rows.assign(severity=rows["kl_nats"], is_damaged=is_damaged))


def answer_damage(results: Results) -> Damage:
    """Return the prompts with a wrong marked answer: a token of it that only the full cache got right.

    Prompts without a marked answer, or of whose answer the full cache got no token right, are no
    evidence and left out.
    """
    steps = results.table(schema.LOGITS)
    steps = steps[steps["is_answer"].eq(True) & steps["hit_full"].eq(True)]
    steps = steps.assign(is_wrong=~steps["same_top"].astype(bool))
    wrong = steps.groupby(["policy", "sequence_id"], as_index=False)["is_wrong"].mean()
    rows = _rows(results)
    rows = rows[rows["sequence_id"].isin(set(wrong["sequence_id"]))]
    rows = rows.merge(wrong, how="left", on=["policy", "sequence_id"])
    severity = rows["kl_nats"].where(rows["is_wrong"].notna())
    return _damage(results, rows.assign(severity=severity, is_damaged=rows["is_wrong"] > 0))


def _rows(results: Results) -> pd.DataFrame:
    """Return the cells of level propagated, each with its prompt."""
    rows = results.whole[results.whole["level"] == LEVEL]
    flags = {name: rows[name].eq(True) for name in ("is_idle", *_ANY)}
    return rows.assign(prompt=prompt_of(rows["sequence_id"]), **flags)


def _damage(results: Results, rows: pd.DataFrame) -> Damage:
    """Return the matrix of rows with ``severity`` (null: no result) and ``is_damaged``."""
    recorded = [str(one["sequence_id"]) for one in results.run["sequences"]]
    domain_of = dict(zip(rows["sequence_id"], rows["domain"].astype(str), strict=True))
    domains: dict[str, str] = {}
    prompt = dict(zip(rows["sequence_id"], rows["prompt"], strict=True))
    for name in sorted(filter(domain_of.__contains__, recorded), key=domain_of.__getitem__):
        domains.setdefault(prompt[name], domain_of[name])
    # What was not evicted is not damaged, whatever rounding did.
    rows = rows.assign(
        severity=rows["severity"].astype(float).mask(rows["is_idle"], 0.0),
        is_damaged=rows["is_damaged"] & ~rows["is_idle"],
    )
    # A missing cell is never taken for a safe one.
    there = rows[rows["severity"].notna()].groupby("policy")["sequence_id"].nunique()
    complete = set(there.index[there == len(domain_of)])
    kinds = rows.drop_duplicates("policy").set_index("policy")
    able = kinds[kinds["causal"].eq(True) & ~kinds["selects"].eq(True)]
    chosen = able[able.index.isin(complete)].sort_index()
    matrices = _matrices(rows[rows["policy"].isin(set(chosen.index))], chosen.index, list(domains))
    return Damage(
        policies=tuple(map(str, chosen.index)),
        families=tuple(map(str, chosen["family"])),
        prompts=tuple(domains),
        domains=tuple(domains.values()),
        num_bounds=int((~kinds["causal"].eq(True)).sum()),
        num_selecting=int((kinds["causal"].eq(True) & kinds["selects"].eq(True)).sum()),
        num_incomplete=len(able) - len(chosen),
        num_prompts_without=prompt_of(pd.Series(recorded)).nunique() - len(domains),
        **matrices,
    )


def _matrices(
    rows: pd.DataFrame, policies: pd.Index[str], prompts: list[str]
) -> dict[str, np.ndarray]:
    """Return what is known of each policy on each prompt, [C, P]."""
    how = (
        {"severity": "max", "is_damaged": "any", "is_idle": "all"}
        | dict.fromkeys(_MEANS, "mean")
        | dict.fromkeys(_ANY, "any")
    )
    cells = rows.groupby(["policy", "prompt"])[list(how)].agg(how)
    cells = cells.reindex(pd.MultiIndex.from_product([policies, prompts]))
    shape = (len(policies), len(prompts))
    return {
        f"{name}_CP": cells[name]
        .to_numpy(np.bool_ if name.startswith("is_") else np.float64)
        .reshape(shape)
        for name in how
    }
