"""What gathering rows of the head and multiplying them takes, beside the whole head.

    python scripts/bench/gather.py                          # the built-in model's head, all threads
    python scripts/bench/gather.py --threads 1 --dtype bfloat16
    python scripts/bench/gather.py --sizes 512 2048 --batches 1 4 16

Medians of rounds in which everything is timed in turn, in a process of its own. Sets are random,
new in each round; each hidden state of a batch has its own, and their union is gathered.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from common import MODEL, about, fresh

SIZES = (256, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 49152)
BATCHES = (1, 8)
COLUMNS = {
    "gather": "gather_s",
    "multiply": "multiply_s",
    "+- both": "spread_s",
    "contiguous": "contiguous_s",
    "full": "full_s",
    "+- full": "full_spread_s",
}
"""Heads of columns of milliseconds; +- is an interquartile range."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load the model, keep its head, and time it."""
    import torch

    from tracekit import load_model
    from tracekit.measure.ceiling import ceiling, head_share
    from tracekit.measure.head import Head
    from tracekit.measure.head_time import time_gather
    from tracekit.model.head import head_tensors

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model(MODEL, dtype=options.dtype)
    tensors = head_tensors(loaded.model)
    head = Head(tensors["head.weight"], tensors.get("head.bias"), loaded.spec.head)
    share = head_share(head.num_bytes, loaded.spec.num_weight_bytes)
    times = time_gather(
        head,
        options.sizes,
        batches=options.batches,
        repeats=options.repeats,
        budget_s=options.budget,
    )
    return {
        "about": about(),
        "shape": f"{list(head.weight_VE.shape)}",
        "share": share,
        "ceiling": None if share is None else ceiling(share),
        "times": [asdict(one) for one in times],
    }


def show(found: dict[str, Any]) -> None:
    """Print a table; a cost above 1 is a set that takes longer than the whole head."""
    times = found["times"]
    print(f"{MODEL}, head {found['shape']} {times[0]['dtype']}; {found['about']}")
    print(f"medians of {times[0]['rounds']} rounds, ms; cost: (gather + multiply) / full")
    print(
        f"the head is {found['share']:.3f} of the weight bytes: for free, a step at batch 1 ",
        end="",
    )
    print(f"would be at most {found['ceiling']:.2f} times as fast\n")
    print(
        f"{'batch':>5}{'size':>8}{'rows':>8}",
        *(f"{name:>11}" for name in COLUMNS),
        "  cost",
        sep="",
    )
    for one in times:
        print(f"{one['batch']:5}{one['size']:8}{one['gathered_rows']:8}", end="")
        print(*(f"{1e3 * one[name]:11.2f}" for name in COLUMNS.values()), sep="", end="")
        print(f"{(one['gather_s'] + one['multiply_s']) / one['full_s']:6.2f}")


def main() -> None:
    """Parse the command line; the measuring process is this script again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of timing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options)))
        return
    found = fresh(__file__, "--inside", *sys.argv[1:])
    if "failed" in found:
        sys.exit(1)
    show(found)


if __name__ == "__main__":
    main()
