"""Candidate sets: many estimators and sizes against the bare product, and against a loop by step.

    python scripts/bench/vocab.py                    # 12 estimators, 6 sizes, 4 000 steps
    python scripts/bench/vocab.py --steps 1000 --threads 1
    python scripts/bench/vocab.py --memory           # peaks at 1 000, 2 000 and 4 000 steps

Real text is recorded once, with a second one to fit on. All is timed in one process, in turn: the
bare product of the hidden states with the head, in blocks; all estimators at all sizes; and, on a few
steps, the same by a plain loop over steps, estimators and sizes. What is made once a trace (clusters,
a decomposition, counts) is timed apart. Bounds that are missed are named, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import MODEL, about, fresh, peak_bytes, text_of

if TYPE_CHECKING:
    import torch

    from tracekit.vocab.others import Others
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Decoder, Sequence

ESTIMATORS = (
    "oracle",
    "random",
    "frequency",
    "previous",
    "neighbours",
    "lookup",
    "ngram",
    "lowrank:rank=64",
    "clustered",
    "topic",
    "screened",
    "lens:layer=-3",
)
SIZES = (256, 512, 1024, 2048, 4096, 8192)
BOUND = 20.0
"""Times the bare product that all of it may take."""

MASS_TOLERANCE = 1e-4
"""Masses of the loop and of ours may differ so much: a product of one row rounds differently."""

NUM_OTHER, NUM_LOOPED, BLOCK_ROWS = 2000, 32, 256


def record(folder: Path, num_steps: int) -> Path:
    """Record a text of so many steps, and another one, with the states of a layer."""
    from tracekit import TextSource, load_model, record_trace
    from tracekit.record.options import RecordOptions

    loaded, texts = load_model(MODEL), folder / "texts"
    texts.mkdir()
    whole = text_of(loaded, num_steps + 1 + NUM_OTHER)
    cut = len(text_of(loaded, num_steps + 1))
    (texts / "a.txt").write_text(whole[:cut], encoding="utf-8")
    (texts / "b.txt").write_text(whole[cut:], encoding="utf-8")
    options = RecordOptions(capture="hidden", hidden_layers=(-3,))
    record_trace(loaded, TextSource(texts), folder / "trace", options)
    return folder / "trace"


def inputs(folder: Path) -> tuple[Sequence, Decoder, Others]:
    """Return the first text of a trace, the model's head, and the other text."""
    import numpy as np
    import torch

    from tracekit import Trace
    from tracekit.progress import Silent
    from tracekit.simulate.corpus import read_corpus, read_sequence
    from tracekit.simulate.plan import Inside
    from tracekit.simulate.recorded_model import RecordedModel
    from tracekit.simulate.vocab import PINNED
    from tracekit.simulate.weights import Weights

    trace = Trace(folder)
    weights = Weights(trace, RecordedModel(trace, Inside(), Silent()), Silent())
    corpus = read_corpus(trace)
    text = corpus.texts[0]
    classes = trace.vocabulary()["class"].astype(str)
    pinned = torch.tensor(np.flatnonzero(classes.isin(PINNED)))
    recorded = read_sequence(trace, text, weights)
    return recorded, weights.decoder(pinned), corpus.without(text.prompt_id, text.domain)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time everything on a recorded trace."""
    import torch

    from tracekit.vocab.engine import evaluate
    from tracekit.vocab.scheme import parse_scheme

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    recorded, decoder, others = inputs(Path(options.trace))
    schemes = [parse_scheme(text) for text in options.estimators]
    given = {"recorded": recorded, "decoder": decoder, "others": others}
    short = _first(recorded, 2)
    start = time.perf_counter()
    evaluate(schemes, SIZES, **(given | {"recorded": short}))
    found: dict[str, Any] = {"about": about(), "fits_s": time.perf_counter() - start}
    found["steps"] = len(recorded.scored_S)
    times: dict[str, list[float]] = {"bare": [], "all": []}
    for _ in range(options.repeats):
        times["bare"].append(_bare(recorded, decoder))
        start = time.perf_counter()
        evaluate(schemes, SIZES, **given)
        times["all"].append(time.perf_counter() - start)
    found |= {f"{name}_s": statistics.median(values) for name, values in times.items()}
    found["alone_s"] = {}
    for scheme in schemes if options.alone else ():
        start = time.perf_counter()
        evaluate([scheme], SIZES, **given)
        found["alone_s"][scheme.text] = time.perf_counter() - start
    found["loop_step_s"] = _loop(schemes, recorded, decoder, others) if options.loop else None
    return found | {"peak_bytes": peak_bytes()}


def _first(recorded: Sequence, num_steps: int) -> Sequence:
    from dataclasses import replace

    return replace(recorded, scored_S=recorded.scored_S[:num_steps])


def _bare(recorded: Sequence, decoder: Decoder) -> float:
    """Return the time of the full logits of all scored steps."""
    start = time.perf_counter()
    for rows_S in recorded.scored_S.split(BLOCK_ROWS):
        decoder.head.logits(recorded.hidden_TE[rows_S])
    return time.perf_counter() - start


def _loop(schemes: list[Scheme], recorded: Sequence, decoder: Decoder, others: Others) -> float:
    """Return the time of a step by a plain loop, and check that it covers the same."""
    import torch

    from tracekit.vocab import blocks
    from tracekit.vocab.engine import evaluate

    few = _first(recorded, NUM_LOOPED)
    wanted = evaluate(schemes, SIZES, recorded=few, decoder=decoder, others=others)
    usual, blocks.BLOCK_NUMBERS = blocks.BLOCK_NUMBERS, decoder.head.spec.num_rows
    memories: dict[str, dict[str, Any]] = {one.text: {} for one in schemes}
    masses: dict[str, list[list[float]]] = {one.text: [] for one in schemes}
    start = time.perf_counter()
    for block in blocks.blocks(few, decoder, others, num_top=256):
        for scheme in schemes:
            found = _loop_scheme(scheme, block, memories[scheme.text], decoder.pinned_P)
            masses[scheme.text].append(found)
    took = (time.perf_counter() - start) / NUM_LOOPED
    blocks.BLOCK_NUMBERS = usual
    for one in wanted:
        text = one.asked.scheme.text
        mass_SN = 1 - torch.from_numpy(one.columns["missing_mass"])
        worst = float((mass_SN - torch.tensor(masses[text], dtype=torch.float64)).abs().max())
        if worst > MASS_TOLERANCE:
            sys.exit(f"{text}: masses of the loop differ by {worst:.1e}")
    return took


def _loop_scheme(
    scheme: Scheme, block: Any, memory: dict[str, Any], pinned_P: torch.Tensor
) -> list[float]:
    """Rank one step, and for each size see what is left of its logits."""
    import torch

    logits_V = block.logits_SV[0].double()
    limit = min(max(SIZES) + len(pinned_P), len(logits_V))
    ids_K = scheme.estimator.candidates(block.known, memory, block.logits_SV, limit)[0]
    ids_K = ids_K[(ids_K >= 0) & ~torch.isin(ids_K, pinned_P)]
    masses = []
    for size in SIZES:
        is_out_V = torch.ones_like(logits_V, dtype=torch.bool)
        is_out_V[ids_K[:size]] = is_out_V[pinned_P] = False
        prob_V = logits_V.softmax(0)
        pruned_V = logits_V.masked_fill(is_out_V, -torch.inf).log_softmax(0)
        tail_V = prob_V[is_out_V]
        torch.xlogy(tail_V, tail_V).sum(), prob_V.masked_fill(~is_out_V, 0).max(), pruned_V.argmax()
        masses.append(1 - float(tail_V.sum()))
    return masses


def report(found: dict[str, Any]) -> bool:
    """Print what was measured; return whether the bound is met."""
    steps, bare_s, all_s = found["steps"], found["bare_s"], found["all_s"]
    cells = f"{len(ESTIMATORS)} estimators x {len(SIZES)} sizes"
    print(f"{cells} over {steps} steps of {MODEL} ({found['about']})")
    print(f"  made once a trace        {found['fits_s']:8.2f} s")
    print(f"  bare product             {bare_s:8.2f} s   {1e3 * bare_s / steps:8.3f} ms a step")
    print(f"  all estimators and sizes {all_s:8.2f} s   {1e3 * all_s / steps:8.3f} ms a step")
    for text, alone_s in found["alone_s"].items():
        print(f"    {text:<24} {alone_s:6.2f} s alone, {alone_s / bare_s:6.2f} times the product")
    times = all_s / bare_s
    print(f"  ratio to the product     {times:8.2f}     (bound {BOUND:g})")
    if found["loop_step_s"] is not None:
        loop_s = found["loop_step_s"]
        print(f"  plain loop               {1e3 * loop_s:8.2f} ms a step, of {NUM_LOOPED}")
        print(f"  ratio of loop to ours    {loop_s * steps / all_s:8.1f}")
    print(f"  peak memory              {found['peak_bytes'] / 1e9:8.2f} GB")
    if times > BOUND:
        print(f"MISSED: {times:.1f} times the bare product, bound {BOUND:g}", file=sys.stderr)
    return times <= BOUND


def main() -> None:
    """Record, measure in fresh processes, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    parser.add_argument("--alone", action="store_true", help="time each estimator alone as well")
    parser.add_argument("--memory", action="store_true", help="peaks at several numbers of steps")
    parser.add_argument("--loop", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        print(json.dumps(measure(options)))
        return
    passed = True
    for steps in (1000, 2000, 4000) if options.memory else (options.steps,):
        with tempfile.TemporaryDirectory() as place:
            passed &= report(fresh(__file__, *_again(options, record(Path(place), steps))))
    sys.exit(not passed)


def _again(options: argparse.Namespace, trace: Path) -> list[str]:
    """Return the arguments of the measuring process."""
    given = ["--trace", str(trace), "--repeats", str(options.repeats)]
    given += ["--estimators", *options.estimators]
    given += [] if options.threads is None else ["--threads", str(options.threads)]
    given += ["--alone"] if options.alone else []
    return given if options.loop and not options.memory else [*given, "--no-loop"]


if __name__ == "__main__":
    main()
