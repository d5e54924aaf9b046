"""What replaying KV policies costs: all cells of a grid, against kvpress running the same cells.

    python scripts/bench/kv.py                      # 10 policies, 8 budgets, 1 024 + 256 tokens
    python scripts/bench/kv.py --cells 8            # kvpress runs 8 cells, the others by proportion
    python scripts/bench/kv.py --budgets            # 8 budgets of a policy against the largest
    python scripts/bench/kv.py --growth             # time and memory against the length

tracekit opens a recorded trace and replays it in a fresh process, loading and writing included;
recording happens once, before, and is not counted. kvpress runs in an environment of its own (made
once) with the model loaded: the prompt under the press, then the recorded tokens after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import fresh, make_trace, peak_bytes, run_kvpress

KEPT = tuple(number / 10 for number in range(1, 9))
"""Kept fractions: the budgets."""

SNAPKV = {"press": "SnapKVPress"}
PRESSES: dict[str, dict[str, Any]] = {
    "random": {"press": "RandomPress"},
    "streaming": {"press": "StreamingLLMPress"},
    "knorm": {"press": "KnormPress"},
    "keydiff": {"press": "KeyDiffPress"},
    "snapkv": SNAPKV,
    "pyramidkv": {"press": "PyramidKVPress"},
    "adakv": SNAPKV | {"around": "AdaKVPress"},
    "tova": {"press": "TOVAPress"},
    "lagkv": {"press": "LagKVPress"},
    "observed": {"press": "ObservedAttentionPress", "attention": "eager"},
}
"""What each policy is in kvpress; it sees attention maps under ``eager`` alone."""

WINDOWED = ("snapkv", "pyramidkv", "adakv")
LENGTHS = (1024, 2048, 4096)
GROWTH = ("h2o:every=16", "snapkv:at=prompt")


def policy_text(name: str) -> str:
    """Return a policy that decides once, with the window that kvpress has by default."""
    window = "window=64," if name in WINDOWED else ""
    return f"{name}:{window}at=prompt"


def recorded(trace: Path, num_prompt: int, num_new: int) -> Path:
    """Record a trace in a process of its own: a child's peak starts at its parent's memory."""
    arguments = ["--trace", str(trace), "--prompt", str(num_prompt), "--new", str(num_new)]
    if "failed" in fresh(__file__, "--record", *arguments):
        sys.exit("the trace could not be recorded: see the words above.")
    return trace


def replay_once(trace: str, policies: list[str], kept: list[float]) -> dict[str, Any]:
    """Replay in this process and measure: open the trace, run all cells, write the results."""
    import torch

    from tracekit import make_plan, simulate_trace

    plan = make_plan(policies, kept=kept)
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        done = simulate_trace(trace, Path(out) / "results", plan)
        wall_s = time.perf_counter() - start
    if done.failed or done.skipped:
        sys.exit(f"cells failed or do not apply: {[*done.failed, *done.skipped]}")
    return {
        "wall_s": wall_s,
        "peak_bytes": peak_bytes(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
    }


def replayed(trace: Path, policies: list[str], kept: tuple[float, ...]) -> dict[str, Any]:
    """Measure a replay in a process of its own; no numbers if it failed."""
    arguments = ["--replay", *policies, "--trace", str(trace), "--kept", *map(str, kept)]
    nothing = {"wall_s": float("nan"), "peak_bytes": float("nan"), "threads": 0, "versions": {}}
    return nothing | fresh(__file__, *arguments)


def run_cells(trace: Path, cells: list[tuple[str, float]]) -> dict[str, Any]:
    """Let kvpress run cells on the tokens of a trace's first sequence."""
    from tracekit import Trace

    opened = Trace(trace)
    sequence = opened.sequences.iloc[0]
    ids = opened.table("tokens", sequence_id=sequence["sequence_id"])["token_id"].tolist()
    end = int(sequence["prompt_end"])
    usual = {"settings": {}, "around": "", "attention": "sdpa"}
    asked = [(name, usual | PRESSES[name], kept) for name, kept in cells]
    return run_kvpress(ids[:end], ids[end:], asked)


def first_cells(names: list[str], num_cells: int) -> list[tuple[str, float]]:
    """Return so many cells of the grid: all policies in turn, each time at other budgets."""
    rounds = range(len(KEPT))
    cells = [
        (name, KEPT[(turn + at) % len(KEPT)]) for turn in rounds for at, name in enumerate(names)
    ]
    return cells[:num_cells]


def compare(trace: Path, names: list[str], num_cells: int, repeats: int) -> None:
    """Print the seconds of both tools for the whole grid, and how many times they differ."""
    policies, num_grid = [policy_text(name) for name in names], len(names) * len(KEPT)
    runs = [replayed(trace, policies, KEPT) for _ in range(repeats)]
    theirs = run_cells(trace, first_cells(names, num_cells))
    ours_s = statistics.median(run["wall_s"] for run in runs)
    prompt_s = [cell[2] for cell in theirs["cells"]]
    rest_s = [cell[3] for cell in theirs["cells"]]
    count = len(prompt_s)
    if not count:
        sys.exit(f"kvpress ran no cell: {theirs['failed']}")
    print(f"policies: {', '.join(policies)}; kept {KEPT[0]} to {KEPT[-1]}: {num_grid} cells")
    print(f"threads: tracekit {runs[0]['threads']}, kvpress {theirs['threads']}; ", end="")
    print(f"versions: tracekit's {runs[0]['versions']}, kvpress's {theirs['versions']}")
    for failure in theirs["failed"]:
        print(f"kvpress failed at {failure}")
    how = "all run" if count == num_grid else f"{count} run, the others by proportion"
    whole_s = (sum(prompt_s) + sum(rest_s)) / count * num_grid
    # As if the prompt's pass, scoring included, had been run for one cell alone: in kvpress's favour.
    once_s = statistics.mean(prompt_s) + sum(rest_s) / count * num_grid
    print(f"tracekit: {ours_s:8.2f} s, loading included (median of {repeats} fresh processes)")
    print(f"kvpress:  {whole_s:8.2f} s for {num_grid} cells ({how}), ", end="")
    print(f"{statistics.mean(prompt_s):.2f} + {statistics.mean(rest_s):.2f} s a cell")
    print(f"          {once_s:8.2f} s with the prompt's pass counted once")
    print(f"{whole_s / ours_s:.1f} times; {once_s / ours_s:.1f} times with that pass counted once")


def budgets(trace: Path, names: list[str], repeats: int) -> None:
    """Print what 8 budgets of each one-shot policy cost beside the largest of them alone."""
    print(f"replay of one policy, median of {repeats} alternated fresh processes, seconds")
    print(f"{'policy':30} {KEPT[-1]:>8} alone {'all ' + str(len(KEPT)):>8} {'times':>7}")
    for name in names:
        found: dict[tuple[float, ...], list[float]] = {KEPT[-1:]: [], KEPT: []}
        for _ in range(repeats):
            for kept, walls in found.items():
                walls.append(replayed(trace, [policy_text(name)], kept)["wall_s"])
        one_s, all_s = (statistics.median(walls) for walls in found.values())
        print(f"{policy_text(name):30} {one_s:14.3f} {all_s:8.3f} {all_s / one_s:7.2f}")


def growth(lengths: list[int], repeats: int) -> None:
    """Print time and memory of policies with 8 budgets as a text grows."""
    print(f"a text, its second half replayed, {len(KEPT)} budgets; ", end="")
    print(f"median time and largest peak of {repeats} fresh processes")
    print(
        f"{'policy':20} {'tokens':>7} {'time, s':>9} {'a pair of tokens, ns':>21} {'peak, MB':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            trace = recorded(Path(folder) / str(length), length, 0)
            for policy in GROWTH:
                runs = [replayed(trace, [policy], KEPT) for _ in range(repeats)]
                wall_s = statistics.median(run["wall_s"] for run in runs)
                peak = max(run["peak_bytes"] for run in runs)
                pair_ns = wall_s / (length**2 / 2) * 1e9
                print(f"{policy:20} {length:7} {wall_s:9.2f} {pair_ns:21.0f} {peak / 1e6:9.0f}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens after it")
    parser.add_argument("--trace", type=Path, help="a trace of one answer; default: record one")
    parser.add_argument("--policies", nargs="+", choices=list(PRESSES), default=list(PRESSES))
    parser.add_argument(
        "--cells",
        type=int,
        default=20,
        help="cells that kvpress runs; fair in whole turns of the policies",
    )
    parser.add_argument("--all", action="store_true", help="kvpress runs all cells")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=float, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        make_trace(options.trace, options.prompt, options.new)
        print(json.dumps({}))
    elif options.replay:
        print(json.dumps(replay_once(str(options.trace), options.replay, options.kept)))
    elif options.growth:
        growth(options.lengths, options.repeats)
    else:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "trace"
            trace = options.trace or recorded(made, options.prompt, options.new)
            if options.budgets:
                budgets(trace, options.policies, options.repeats)
            else:
                num_cells = len(PRESSES) * len(KEPT) if options.all else options.cells
                compare(trace, options.policies, num_cells, options.repeats)


if __name__ == "__main__":
    main()
