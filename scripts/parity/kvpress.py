"""Whether tracekit keeps the keys that kvpress 0.5.5 keeps, on the same queries, keys and values.

kvpress runs in an environment of its own (made once, some minutes and 2 GB): it prefills random
Llamas, and says which keys each press keeps. tracekit replays the same tensors. A set that differs
needs a reason: equal or nearly equal scores, between which each tool chooses its own way, or a
difference by design that is listed here. Any other one ends the script with exit code 1.

    python scripts/parity/kvpress.py
    python scripts/parity/kvpress.py --lengths 160 512 --policies snapkv lagkv
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from environment import KVPRESS, PACKAGES, kvpress_python
from pairs import PAIRS, Pair

from tracekit.kv.amounts import Amount, Frac, Tokens
from tracekit.kv.budget import Cache
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.plan import make_shares, observe
from tracekit.kv.presets import PRESETS
from tracekit.kv.reference import Reference
from tracekit.kv.replay import Family, Setting, replay
from tracekit.kv.schedule import Spans
from tracekit.spec import LayerSpec, RopeSpec

FRACTIONS = tuple(number / 10 for number in range(1, 10))
SHAPES = ((4, 4), (4, 2), (6, 2), (3, 1))
"""Query heads and KV heads."""

LENGTHS = (160, 300, 512, 700)
"""Short and long for LagKV's partitions, whole and broken chunks of 256."""

LAYERS = 4
NEAR = 1e-5
"""Gap, relative to usual scores, below which float32 sums of another order may swap two keys."""

TIES = ("of equal scores", "of nearly equal scores")
"""Sets between which kvpress's topk chooses as it likes; tracekit takes the more recent key."""


@dataclass(frozen=True)
class Case:
    """A random Llama and the length of its prompt."""

    heads: int
    kv_heads: int
    tokens: int
    seed: int
    layers: int = LAYERS


def ask_kvpress(cases: list[Case], pairs: list[Pair], attention: str, folder: Path) -> None:
    """Let kvpress write what it keeps, one file a case."""
    presses = [{"press": p.press, "settings": p.settings, "around": p.around} for p in pairs]
    job = {
        "cases": [vars(case) for case in cases],
        "presses": presses,
        "fractions": FRACTIONS,
        "attention": attention,
        "folder": str(folder),
    }
    command = [str(kvpress_python()), str(Path(__file__).parent / "side" / "kept.py")]
    done = subprocess.run(command, input=json.dumps(job), text=True, check=False)
    if done.returncode:
        sys.exit(f"kvpress's side ended with {done.returncode}: see its words above.")


def make_reference(case: Case, seen: Any) -> Reference:
    """Return the prompt's rows and one more, since something must come after the decision."""
    head_dim = seen["key"].shape[-1]
    layer = LayerSpec(
        index=0,
        kind="full",
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        rope="default",
    )
    rope = RopeSpec(
        kind="default", theta=10_000.0, inv_freq=tuple(seen["inv_freq"].tolist()), layout="halves"
    )
    query, key, value = (
        np.concatenate([one, one[:, :, -1:]], axis=2)
        for one in (seen["query"], seen["key"], seen["value"])
    )
    return Reference(query_LHTD=query, key_LGTD=key, value_LGTD=value, layer=layer, rope=rope)


def kept_by_tracekit(
    pair: Pair, case: Case, reference: Reference, kept_FLGK: np.ndarray
) -> np.ndarray:
    """Return tracekit's mask [F, L, G, K], given as many keys as kvpress kept."""
    amounts: list[Amount] = [Frac(fraction) for fraction in FRACTIONS]
    if not pair.is_fraction:
        num_heads = case.layers * case.kv_heads
        amounts = [Tokens(int(mask.sum()) // num_heads) for mask in kept_FLGK]
    policies = tuple(replace(parse(pair.policy), kept=amount) for amount in amounts)
    layers = tuple(range(case.layers))
    setting = Setting(
        layers=layers,
        cache=Cache(tuple(replace(reference.layer, index=layer) for layer in layers)),
        spans=Spans(num_tokens=case.tokens + 2, prompt_end=case.tokens),
        seed=0,
    )
    shares = make_shares(policies, [observe(policies[0], reference, setting)], setting)
    (result,) = replay([Family(policies, shares)], reference, setting)
    if result is None:
        raise AssertionError(f"{pair.policy} decided nothing on {case}")
    kept: np.ndarray = result.evicted_at_NLGT[..., : case.tokens] == NEVER
    return kept


def classify(
    ours_GK: np.ndarray, theirs_GK: np.ndarray, score_GK: np.ndarray, *, is_shared: bool
) -> list[str]:
    """Return for each KV head of a layer: equal, one of ``TIES``, or different.

    Two sets of one size differ by a tie if, by kvpress's own scores, what only it keeps is no better
    than what only tracekit keeps. Where heads share a budget they are taken together.
    """
    lines = (
        [slice(None)] * len(ours_GK)
        if is_shared
        else [slice(g, g + 1) for g in range(len(ours_GK))]
    )
    found = []
    for g, line in enumerate(lines):
        ours, theirs, score = ours_GK[line], theirs_GK[line], score_GK[line].astype(np.float64)
        if (ours_GK[g] == theirs_GK[g]).all():
            found.append("equal")
            continue
        if ours.sum() != theirs.sum():
            found.append("different")
            continue
        best, worst = score[theirs & ~ours].max(), score[ours & ~theirs].min()
        gap = best - worst
        # Rounding is that of usual scores, which may be sums of larger terms than these two.
        size = max(abs(best), abs(worst), np.median(np.abs(score)))
        near = abs(gap) <= NEAR * size
        found.append(TIES[0] if gap == 0 else TIES[1] if near else "different")
    return found


@dataclass
class Tally:
    """What was found of one pair."""

    counts: Counter[str] = field(default_factory=Counter)
    overlaps: list[float] = field(default_factory=list)
    first: str = ""

    def add(self, pair: Pair, case: Case, ours: np.ndarray, theirs: np.ndarray, seen: Any) -> None:
        """Compare the sets of all fractions and layers of one case."""
        for f, fraction in enumerate(FRACTIONS):
            for layer in range(case.layers):
                masks = ours[f, layer], theirs[f, layer]
                score = seen[fraction][layer]
                for g, what in enumerate(classify(*masks, score, is_shared=bool(pair.around))):
                    if what == "different" and pair.excuse(case.tokens, masks[0][g], masks[1][g]):
                        what = "by design"
                    if what == "different" and not self.first:
                        self.first = f"{case}, kept {fraction}, layer {layer}, KV head {g}"
                    self.counts[what] += 1
                    both = (masks[0][g] & masks[1][g]).sum()
                    self.overlaps.append(both / masks[1][g].sum())

    def line(self, pair: Pair) -> str:
        """Return the row of the table."""
        count, total = self.counts, self.counts.total()
        why = [f"{count[name]} {name}" for name in TIES if count[name]]
        if count["by design"]:
            why.append(f"{count['by design']} by design: {pair.reason}")
        if count["different"]:
            why.append(f"{count['different']} WITHOUT A REASON, first in {self.first}")
        overlap = f"{np.mean(self.overlaps):.4f}"
        return row(pair.policy, pair.theirs, f"{count['equal']}/{total}", overlap, "; ".join(why))


def row(policy: str, press: str, sets: str, overlap: str, why: str) -> str:
    """Return one line of the table."""
    return f"{policy:48} {press:56} {sets:>11} {overlap:>8}  {why}"


def compare(pairs: list[Pair], cases: list[Case]) -> dict[str, Tally]:
    """Run both tools on all cases, and count by policy.

    Presses that need the same attention share one run.
    """
    tallies = {pair.policy: Tally() for pair in pairs}
    for attention in sorted({pair.attention for pair in pairs}):
        some = [pair for pair in pairs if pair.attention == attention]
        with tempfile.TemporaryDirectory() as folder:
            ask_kvpress(cases, some, attention, Path(folder))
            for number, case in enumerate(cases):
                with np.load(Path(folder) / f"{number}.npz") as file:
                    seen = dict(file)
                reference = make_reference(case, seen)
                for at, pair in enumerate(some):
                    theirs = seen[f"kept{at}"].swapaxes(0, 1)
                    scores = {one: seen[f"score{at}_{one}"] for one in FRACTIONS}
                    ours = kept_by_tracekit(pair, case, reference, theirs)
                    tallies[pair.policy].add(pair, case, ours, theirs, scores)
    return tallies


def main() -> int:
    """Parse the command line, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--policies", nargs="+", choices=sorted({pair.name for pair in PAIRS}))
    options = parser.parse_args()
    wanted = [one for one in PAIRS if not options.policies or one.name in options.policies]
    known = PRESETS.names()
    pairs = [one for one in wanted if one.press and one.name in known]
    for pair in pairs:
        parse(pair.policy)  # a parameter that is named otherwise shows before kvpress runs
    shapes = [(*shape, length) for length in options.lengths for shape in SHAPES]
    cases = [Case(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    tallies = compare(pairs, cases) if pairs else {}
    print(f"tracekit against {KVPRESS} ({', '.join(PACKAGES[:2])}), float32, at the prompt's end")
    print(
        f"kept {FRACTIONS[0]} to {FRACTIONS[-1]}, {LAYERS} layers, query and KV heads {SHAPES}, ",
        end="",
    )
    print(f"prompts of {options.lengths} tokens\n")
    print(row("policy", "kvpress", "sets equal", "overlap", "the others"))
    for pair in wanted:
        if pair.policy in tallies:
            print(tallies[pair.policy].line(pair))
        else:
            print(row(pair.policy, pair.theirs, "-", "-", pair.why_not or "not built"))
    return int(any(tally.counts["different"] for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
