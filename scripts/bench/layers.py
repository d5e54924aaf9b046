"""What a sensitivity sweep costs: one layer changed at a time, all others full.

    python scripts/bench/layers.py                  # 30 layers, 3 rules, 512 rows, 256 of them scored
    python scripts/bench/layers.py --heads          # and each KV head alone
    python scripts/bench/layers.py --rules rows:0.03 --tokens 1025

Layers below the one that is changed are not run again: rows through layers are counted and held
against (L + 1) / 2 passes a rule. Loading the model and recording the text are not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import about, make_trace

from tracekit import Trace, load_model
from tracekit.live.layer_rule import parse_rule
from tracekit.model.resume import decoder_layers
from tracekit.simulate.layers import layer_sensitivity
from tracekit.simulate.rerun import rerun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.live.layer_rule import LayerRule
    from tracekit.model.load import LoadedModel

RULES = ("rows:0.03,at=0.5", "h2o:kept=0.3,every=16,from=0.5", "snapkv:kept=0.3,at=0.5")
BOUND_S = 90.0


@contextmanager
def counted_rows(model: Any) -> Iterator[list[int]]:
    """Note the rows of each run of a layer, until the block ends."""
    rows: list[int] = []

    def count(module: Any, args: tuple[Any, ...]) -> None:
        del module
        rows.append(args[0].shape[:-1].numel())

    # A layer that is passed by is called all the same; its feed-forward part is not.
    handles = [layer.mlp.register_forward_pre_hook(count) for layer in decoder_layers(model)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One sweep: seconds, cells, and rows that went through a layer.

    ``shared_s`` is the sequence's own pass; ``noise_rows`` are those run to know what rounding does.
    """

    shared_s: float
    sweep_s: float
    num_layers: int
    num_cells: int
    num_scored: int
    sweep_rows: int
    noise_rows: int


def sweep(trace: Trace, loaded: LoadedModel, rules: list[LayerRule], *, heads: bool) -> Sweep:
    """Run the text's own pass, then all layers under all rules."""
    start = time.perf_counter()
    again = rerun(trace, loaded, trace.sequences.iloc[0], seed=0)
    shared = time.perf_counter()
    if again is None:
        raise AssertionError("the text has a single token")
    with counted_rows(loaded.model) as rows:
        found = layer_sensitivity(again, rules, heads=heads)
    end = time.perf_counter()
    points = {rule.point(again.setting.spans) for rule in rules} - {None}
    num_layers, num_scored = len(again.setting.cache.layers), found[0]["num_scored"]
    noise_rows = len(points) * num_layers * num_scored
    return Sweep(
        shared_s=shared - start,
        sweep_s=end - shared,
        num_layers=num_layers,
        num_cells=len(found),
        num_scored=num_scored,
        sweep_rows=sum(rows) - noise_rows,
        noise_rows=noise_rows,
    )


def show(runs: list[Sweep], rules: list[LayerRule]) -> None:
    """Print seconds, and layer runs against what the sweep may cost."""
    one = runs[0]
    shared_s, sweep_s = (
        statistics.median(getattr(run, name) for run in runs) for name in ("shared_s", "sweep_s")
    )
    whole_s = shared_s + sweep_s
    # Every layer of a sweep runs itself and all above it: L (L + 1) / 2 layer runs a rule.
    runs_of_rows, noise_runs = one.sweep_rows / one.num_scored, one.noise_rows / one.num_scored
    most_runs = one.num_cells * (one.num_layers + 1) / 2
    print(f"rules: {', '.join(rule.text for rule in rules)}")
    print(f"{one.num_layers} layers, {one.num_cells} cells of {one.num_scored} scored rows")
    print(f"{about()}; median of {len(runs)} runs")
    print(f"the text's own pass {shared_s:7.2f} s")
    print(f"the sweep           {sweep_s:7.2f} s, {sweep_s / one.num_cells * 1e3:.0f} ms a cell")
    print(f"together            {whole_s:7.2f} s, {whole_s / BOUND_S:.2f} of {BOUND_S:.0f} s")
    print(f"layer runs          {runs_of_rows:7.0f}  , {runs_of_rows / most_runs:.3f} of ", end="")
    print(f"{most_runs:.0f}: (L + 1) / 2 passes a rule or head of it")
    print(f"                    {noise_runs:7.0f}   more, for the noise floor")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens",
        type=int,
        default=513,
        help="of the text: rows and the last one's target; half is scored",
    )
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--heads", action="store_true", help="each KV head alone as well")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="a recorded text; default: record one")
    options = parser.parse_args()
    rules = [parse_rule(text) for text in options.rules]
    with tempfile.TemporaryDirectory() as folder:
        if options.trace is None:
            make_trace(Path(folder) / "trace", options.tokens, 0, capture="steps")
        trace = Trace(options.trace or Path(folder) / "trace")
        loaded = load_model(trace.spec.name, dtype=trace.spec.dtype)
        runs = [sweep(trace, loaded, rules, heads=options.heads) for _ in range(options.repeats)]
    show(runs, rules)


if __name__ == "__main__":
    main()
