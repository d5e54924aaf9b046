"""What eviction inside the model costs in one pass, beside decoders that really drop entries.

    python scripts/bench/through.py                 # against decoding, 128 + 384 tokens
    python scripts/bench/through.py --long          # a cell of 4 096 tokens against a full pass
    python scripts/bench/through.py --kvpress       # perplexity and time of prompt-only cells

Every ratio is measured in one run: what is compared alternates, medians are printed. A cell is the
rows after the eviction point and the head over them; the text's own pass, which all cells of a text
share, is counted where it says so. kvpress runs in an environment of its own (made once).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
import torch
from common import MODEL, PARITY, ROOT, about, ids_of, make_trace, run_kvpress

sys.path[:0] = [str(ROOT), str(PARITY)]

from pairs import PAIRS, Pair

from tests.live.dropping import Dropping, HeavyHitters
from tracekit import load_model, make_plan, simulate_trace
from tracekit.kv.amounts import Frac
from tracekit.kv.budget import Cache
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.replay import Family, Setting
from tracekit.kv.schedule import Spans
from tracekit.live.driver import drive
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.live.run import FullRun, decode, full_run
from tracekit.record.generate import plain_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tracekit.kv.policy import Policy
    from tracekit.model.load import LoadedModel

Made = TypeVar("Made")
Given = ParamSpec("Given")

KEPT_FRAC = 0.3
BOUNDS = {16: 10, 1: 3}
"""By tokens between decisions, how many times faster than decoding a cell must be."""

BUDGETS = (0.1, 0.25, 0.5, 0.75)
LONG_KEPT_FRAC = 0.1
LONG_POLICIES = ("snapkv:at=prompt", "h2o:every=16,from=prompt")
SAME_KEYS, SAME_PERPLEXITY = 0.999, 0.005
"""Part of kvpress's kept keys that tracekit keeps too, from which on sets are said to agree; and how
far perplexities may then be apart, relative."""


class Watch:
    """Seconds of whatever is timed, by name."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = defaultdict(list)

    def time(
        self, name: str, work: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Made:
        """Do some work and note how long it took."""
        start = time.perf_counter()
        made = work(*args, **kwargs)
        self._times[name].append(time.perf_counter() - start)
        return made

    def median(self, name: str) -> float:
        """Return the median of a name."""
        return statistics.median(self._times[name])


@dataclass(frozen=True)
class Text:
    """A text whose prompt ends at ``point``: its rows from there on are scored."""

    loaded: LoadedModel
    ids: list[int]
    point: int

    @property
    def target_R(self) -> torch.Tensor:
        """Token that came after each scored row."""
        return torch.tensor(self.ids[self.point + 1 :])

    @property
    def setting(self) -> Setting:
        """Where the text has its parts."""
        spans = Spans(num_tokens=len(self.ids), prompt_end=self.point)
        return Setting(layers=(), cache=Cache(self.loaded.spec.layers), spans=spans, seed=0)

    def run(self) -> FullRun:
        """Run the text under the full cache."""
        return full_run(self.loaded, self.ids[:-1])

    def head(self, hidden_XE: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V]."""
        with torch.no_grad():
            logits_XV: torch.Tensor = self.loaded.model.get_output_embeddings()(hidden_XE)
        return logits_XV

    def nll_nats(self, logits_RV: torch.Tensor) -> float:
        """Return the mean surprisal of the scored rows."""
        loss = torch.nn.functional.cross_entropy(logits_RV.double(), self.target_R)
        return float(loss)


def first_text(num_tokens: int, point: int) -> Text:
    """Return the beginning of real text, and the model loaded and warm."""
    loaded = load_model(MODEL)
    text = Text(loaded, ids_of(loaded, num_tokens), point)
    replace(text, ids=text.ids[:32]).run()
    return text


def prune(text: Text, run: FullRun, policies: Sequence[Policy]) -> tuple[torch.Tensor, Pruned]:
    """Return final hidden states [B, R, E] of the rows after the point, and who left when."""
    pruned = Pruned(run, planned(run, policies, text.setting), text.setting)
    first_layer, num_runs = pruned.first_layer, pruned.num_runs
    return drive(run, pruned, text.point, num_runs=num_runs, first_layer=first_layer), pruned


def generate(text: Text) -> None:
    """Let the model go on from the prompt by itself, as many tokens as the text has."""
    prompt_1T, num_new = torch.tensor([text.ids[: text.point]]), len(text.ids) - text.point
    config = plain_config(text.loaded.model, num_new, None)
    config.update(min_new_tokens=num_new, eos_token_id=None)
    with torch.no_grad():
        text.loaded.model.generate(
            prompt_1T, attention_mask=torch.ones_like(prompt_1T), generation_config=config
        )


def drop(text: Text, kept_frac: float, every: int) -> tuple[torch.Tensor, Dropping]:
    """Decode token by token under H2O; a decoder needs the logits of each row."""
    decoder = Dropping(text.loaded.model, HeavyHitters(kept_frac=kept_frac, every=every))
    rows = decoder.rows(text.ids[:-1], text.point)
    return torch.cat([text.head(hidden_1E) for hidden_1E in rows]), decoder


def num_differing(decoder: Dropping, pruned: Pruned) -> tuple[int, int]:
    """Return how many decisions of a KV head differ, of how many."""
    differing = total = 0
    for number, layer in decoder.layers.items():
        evicted_at_GT = pruned.evicted_at[number][0]
        for seen, position_GK, _ in layer.decisions:
            held_GT = torch.zeros(len(position_GK), seen, dtype=torch.bool)
            held_GT.scatter_(1, position_GK, value=True)
            differing += int((held_GT != (evicted_at_GT[:, :seen] > seen)).any(1).sum())
            total += len(held_GT)
    return differing, total


def against_decoding(text: Text, repeats: int) -> None:
    """Print what one pass costs beside decoding with real eviction, and how far they are apart."""
    watch, found = Watch(), {}
    for _ in range(repeats):
        watch.time("plain", generate, text)
        run = watch.time("full", text.run)
        watch.time("full head", text.head, run.hidden_TE[text.point :])
        for every in BOUNDS:
            policy = parse(f"h2o:kept={KEPT_FRAC},every={every}")
            true_RV, decoder = watch.time(f"drop {every}", drop, text, KEPT_FRAC, every)
            hidden_1RE, pruned = watch.time(f"cell {every}", prune, text, run, [policy])
            logits_RV = watch.time(f"head {every}", text.head, hidden_1RE[0])
            found[every] = true_RV, logits_RV, num_differing(decoder, pruned)
    plain_s, num_new = watch.median("plain"), len(text.ids) - text.point
    own_s = watch.median("full") + watch.median("full head")
    print(f"plain generate: {plain_s:.2f} s, {plain_s / num_new * 1e3:.1f} ms a token; ", end="")
    print(f"the text's own pass, shared by its cells: {own_s:.2f} s")
    for every, (true_RV, logits_RV, (differing, total)) in found.items():
        drop_s = watch.median(f"drop {every}")
        cell_s = watch.median(f"cell {every}") + watch.median(f"head {every}")
        print(f"\nh2o:kept={KEPT_FRAC},every={every}")
        print(f"  decoding {drop_s:6.2f} s, {drop_s / plain_s:.2f} of plain generate (bound 1.2)")
        print(
            f"  one cell {cell_s:6.2f} s: decoding takes {drop_s / cell_s:.1f} times as long ",
            end="",
        )
        print(f"(bound {BOUNDS[every]}), {drop_s / (cell_s + own_s):.1f} times with the own pass")
        print(f"  logits differ by at most {(true_RV - logits_RV).abs().max():.2g}; ", end="")
        print(f"{differing} of {total} decisions of a head differ; perplexity ", end="")
        print(f"{np.exp(text.nll_nats(true_RV)):.6f} and {np.exp(text.nll_nats(logits_RV)):.6f}")


def against_decodes(text: Text, repeats: int) -> None:
    """Print what a whole simulation of some budgets costs beside decoding them one by one."""
    watch = Watch()
    plan = make_plan(f"h2o:every=16,from={text.point}", kept=BUDGETS, levels="propagated")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        make_trace(trace, len(text.ids), 0, capture="steps")
        for number in range(repeats):
            out = Path(folder) / f"results{number}"
            done = watch.time("simulate", simulate_trace, trace, out, plan)
            if done.failed or done.skipped:
                sys.exit(f"cells failed or do not apply: {[*done.failed, *done.skipped]}")
        for kept_frac in BUDGETS:
            watch.time(f"drop {kept_frac}", drop, text, kept_frac, 16)
    decodes_s = sum(watch.median(f"drop {kept_frac}") for kept_frac in BUDGETS)
    simulate_s = watch.median("simulate")
    print(f"\nsimulate, h2o:every=16 at {BUDGETS}, model loaded and results written: ", end="")
    print(f"{simulate_s:.2f} s; {len(BUDGETS)} decodes: {decodes_s:.2f} s, ", end="")
    print(f"{decodes_s / simulate_s:.1f} times as long")


def long_cells(text: Text, repeats: int) -> None:
    """Print what a cell of a long text costs beside full passes of the model."""
    watch, run, num_rows = Watch(), text.run(), len(text.ids) - 1 - text.point
    cells = [replace(parse(one), kept=Frac(LONG_KEPT_FRAC)) for one in LONG_POLICIES]
    for _ in range(repeats):
        with torch.no_grad():
            watch.time("model", decode, text.loaded, run.ids_1T, 0)
        full = Pruned(run, Family((parse(f"full:at={text.point}"),)), text.setting)
        watch.time("full", drive, run, full, text.point)
        for policy in cells:
            watch.time(policy.text, prune, text, run, [policy])
    model_s, full_s = watch.median("model"), watch.median("full")
    print(
        f"\n{text.point} + {num_rows} rows, {LONG_KEPT_FRAC} kept; no head: a full pass of the ",
        end="",
    )
    print(f"model {model_s:.2f} s; the later rows under the full cache, same path, {full_s:.2f} s")
    for policy, name in zip(cells, LONG_POLICIES, strict=True):
        cell_s = watch.median(policy.text)
        print(f"  {name:24} {cell_s:6.2f} s, {cell_s / model_s:.2f} of a full pass, ", end="")
        print(f"{cell_s / full_s:.2f} of the same rows under the full cache")


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """What kvpress made of a cell: seconds, mean surprisal, and the prompt's keys kept, as bits."""

    prompt_s: float
    rest_s: float
    nll_nats: float
    packed: str

    def shared_frac(self, ours_GT: np.ndarray) -> float:
        """Return the part of the kept keys that tracekit keeps too, layers one after the other."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.packed), dtype=np.uint8))
        theirs_GT = bits[: ours_GT.size].reshape(ours_GT.shape).astype(bool)
        return float((ours_GT & theirs_GT).sum() / theirs_GT.sum())


def run_presses(text: Text, pairs: Sequence[Pair]) -> dict[tuple[str, float], Theirs]:
    """Return what kvpress makes of all cells; those that failed there are named and left out."""
    cells = []
    for pair in pairs:
        names = ("press", "settings", "around", "attention")
        press = {name: getattr(pair, name) for name in names}
        cells += [(pair.policy, press, kept_frac) for kept_frac in BUDGETS]
    found = run_kvpress(text.ids[: text.point], text.ids[text.point :], cells)
    for failure in found["failed"]:
        print(f"kvpress failed at {failure}")
    print(f"kvpress: {found['threads']} threads, {found['versions']}")
    return {
        (name, kept_frac): Theirs(prompt_s=prompt_s, rest_s=rest_s, nll_nats=nll, packed=packed)
        for name, kept_frac, prompt_s, rest_s, nll, packed in found["cells"]
    }


def kept_GT(pruned: Pruned, number: int, point: int) -> np.ndarray:
    """Return the prompt's keys that the ``number``-th policy keeps, layers one after the other."""
    layers = [one[number, :, :point] == NEVER for _, one in sorted(pruned.evicted_at.items())]
    return torch.cat(layers).numpy()


def against_kvpress(text: Text, pairs: Sequence[Pair]) -> int:
    """Print perplexity and seconds of both tools for the same cells; 1 if a bound is missed."""
    theirs, watch, agreeing = run_presses(text, pairs), Watch(), [0.0]
    run = watch.time("full", text.run)
    print(f"the text's own pass takes tracekit {watch.median('full'):.2f} s, once; ", end="")
    print(f"perplexities must be within {SAME_PERPLEXITY:.1%} where {SAME_KEYS} of the keys agree")
    print(f"{'policy':64} {'kept':>5} {'perplexity':>11} {'kvpress':>9} {'apart':>9} ", end="")
    print(f"{'same keys':>10} {'a cell, s':>10} {'kvpress':>8}")
    for pair in pairs:
        form = pair.policy.replace("at=prompt", f"at={text.point}")
        policies = [replace(parse(form), kept=Frac(kept_frac)) for kept_frac in BUDGETS]
        hidden_BRE, pruned = watch.time(form, prune, text, run, policies)
        logits_BRV = watch.time(f"head {form}", text.head, hidden_BRE)
        ours_s = (watch.median(form) + watch.median(f"head {form}")) / len(BUDGETS)
        for number, kept_frac in enumerate(BUDGETS):
            their = theirs.get((pair.policy, kept_frac))
            if their is None:
                continue
            nll_nats = text.nll_nats(logits_BRV[number])
            apart = float(np.expm1(nll_nats - their.nll_nats))
            same = their.shared_frac(kept_GT(pruned, number, text.point))
            agreeing += [abs(apart)] * (same >= SAME_KEYS)
            print(f"{pair.policy:64} {kept_frac:5} {np.exp(nll_nats):11.4f} ", end="")
            print(
                f"{np.exp(their.nll_nats):9.4f} {apart:+9.3%} {same:10.4f} {ours_s:10.2f} ", end=""
            )
            print(f"{their.prompt_s + their.rest_s:8.2f}")
    print(f"kept sets agree in {len(agreeing) - 1} of {len(theirs)} cells, ", end="")
    print(f"perplexities there are at most {max(agreeing):.3%} apart")
    return int(max(agreeing) > SAME_PERPLEXITY)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--decode", action="store_true", help="against decoding (the default)")
    mode.add_argument("--long", action="store_true", help="a long text, beside full passes")
    mode.add_argument("--kvpress", action="store_true", help="prompt-only cells of kvpress")
    names = sorted({pair.name for pair in PAIRS if pair.press})
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="of --kvpress")
    parser.add_argument("--prompt", type=int, nargs="+", help="tokens before the point")
    parser.add_argument("--new", type=int, nargs="+", help="tokens after it, one number a prompt")
    parser.add_argument("--repeats", type=int, default=3, help="not of --kvpress")
    options = parser.parse_args()
    usual = {"long": [(2048, 2048), (3584, 512)], "kvpress": [(1024, 256)]}
    sizes = next((usual[name] for name in usual if getattr(options, name)), [(128, 384)])
    if options.prompt and options.new:
        sizes = list(zip(options.prompt, options.new, strict=True))
    runs = "one run" if options.kvpress else f"median of {options.repeats} runs"
    print(f"{about()}; sizes (prompt, new): {sizes}; {runs}")
    missed = 0
    for num_prompt, num_new in sizes:
        text = first_text(num_prompt + num_new, num_prompt)
        if options.long:
            long_cells(text, options.repeats)
        elif options.kvpress:
            pairs = [one for one in PAIRS if one.press and one.name in options.policies]
            missed |= against_kvpress(text, pairs)
        else:
            against_decoding(text, options.repeats)
            against_decodes(text, options.repeats)
    return missed


if __name__ == "__main__":
    sys.exit(main())
