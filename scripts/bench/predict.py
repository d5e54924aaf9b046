"""How well influence probes foretell what a policy does to the model's output.

Texts of different domains are recorded with probes; every policy is run on each of them at levels
local, predicted and propagated; the ranks are compared. None of this depends on the machine's speed.

    python scripts/bench/predict.py                     # 14 policies, 4 budgets, 6 texts
    python scripts/bench/predict.py --markdown          # the tables of the README
    python scripts/bench/predict.py --json found.json
    python scripts/bench/predict.py --trace TRACE       # a trace recorded with --capture influence

Bounds that are missed are named, and the script ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path

import numpy as np
import pandas as pd
from common import MODEL, ROOT, about

from tracekit import TextSource, Trace, load_model, make_plan, record_trace, simulate_trace
from tracekit.measure.stats import paired_difference
from tracekit.record.options import RecordOptions
from tracekit.record.probe_options import ProbeOptions
from tracekit.simulate.calibration import calibration
from tracekit.simulate.calibration_cells import calibration_cells, counted_cells

POLICIES = (
    "random",
    "streaming",
    "h2o:every=16",
    "vatp:every=16",
    "tova:every=16",
    "redundancy",
    "snapkv:window=16",
    "adakv:window=16",
    "pyramidkv:window=16,pyramid_window=16",
    "expected",
    "knorm",
    "keydiff",
    "observed",
    "sinkuniform",
)
KEPT = (0.1, 0.25, 0.5, 0.75)
BLOCK_ROWS = 16
"""Chosen before, on other texts: not to be chosen here."""

SPEARMAN, SPEARMAN_WITHIN, PAIRS_ORDERED = 0.95, 0.9, 0.85
"""Bounds."""


def texts() -> dict[str, str]:
    """Return a text of each domain: all of them lie in this checkout or in Python's library."""
    from pydoc_data.topics import topics

    lines = (ROOT / "data" / "prompts" / "core.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {one["id"]: one for one in map(json.loads, lines)}
    codes = [{"code": one, "phrase": one.phrase, "about": one.description} for one in HTTPStatus]
    return {
        "documentation": "\n\n".join(topics[name] for name in sorted(topics)[40:]),
        "code": Path(argparse.__file__).read_text(encoding="utf-8").partition("\nimport ")[2],
        "licence": (ROOT / "LICENSE").read_text(encoding="utf-8"),
        "json": json.dumps(codes, indent=1),
        "story": prompts["retrieval-04"]["context"],
        "chinese": prompts["retrieval-03"]["context"],
    }


def record(folder: Path, num_tokens: int, num_probes: int) -> Path:
    """Record the beginnings of all texts with probes."""
    loaded, inputs, trace = load_model(MODEL), folder / "texts", folder / "trace"
    inputs.mkdir()
    for name, text in texts().items():
        ids = loaded.tokenizer(text).input_ids[:num_tokens]
        # A character whose bytes are cut in two is left out.
        cut = loaded.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        (inputs / name).write_text(cut, encoding="utf-8")
    options = RecordOptions(
        capture="influence", head="omit", probes=ProbeOptions(number=num_probes)
    )
    record_trace(loaded, TextSource(inputs), trace, options)
    return trace


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well two estimates order the same cells: all, or those of one text."""

    spearman: float
    spearman_local: float
    pairs_ordered: float
    pairs_ordered_local: float
    num_cells: int
    num_pairs: int


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, and how well its own cells are ordered."""

    name: str
    num_tokens: int
    num_scored: int
    kl_nats: float
    agreement: Agreement


def statistics(kv: pd.DataFrame) -> pd.DataFrame:
    """Return the calibration of some results: a statistic a row."""
    return pd.DataFrame(calibration(kv, seed=0).columns)


def agreement(kv: pd.DataFrame) -> Agreement:
    """Return how well the cells of some results are ordered."""
    found = statistics(kv).set_index(["statistic", "level", "group"])["value"]
    return Agreement(
        spearman=found["spearman", "predicted", "all"],
        spearman_local=found["spearman", "local", "all"],
        pairs_ordered=found["pairs_ordered", "predicted", "all"],
        pairs_ordered_local=found["pairs_ordered", "local", "all"],
        num_cells=len(counted_cells(calibration_cells(kv))),
        num_pairs=int(found["pairs", "predicted", "all"]),
    )


def by_text(kv: pd.DataFrame, sequences: pd.DataFrame) -> list[Text]:
    """Return how well the cells of each text are ordered."""
    lengths = sequences.set_index("sequence_id")["num_tokens"]
    found = []
    for name, rows in kv.groupby(kv["sequence_id"].astype(str)):
        cells = counted_cells(calibration_cells(rows))
        found.append(
            Text(
                name=str(name).partition("#")[0],
                num_tokens=int(lengths[name]),
                num_scored=int(rows["num_scored"].max()),
                kl_nats=float(cells["kl_nats"].median()),
                agreement=agreement(rows),
            )
        )
    return found


def by_policy(cells: pd.DataFrame) -> pd.DataFrame:
    """Return of each policy the share of its pairs that are ordered rightly, and how low it runs."""
    keys = ["sequence_id", "target_frac"]
    pairs = cells.merge(cells, on=keys, suffixes=("", "_other"))
    change, told, local = (
        pairs[name] - pairs[f"{name}_other"]
        for name in ("kl_nats", "kl_predicted_nats", "output_error")
    )
    noise = np.maximum(pairs["noise_kl_nats"], pairs["noise_kl_nats_other"])
    counted = (change.abs() > noise) & (told != 0)
    pairs = pairs.assign(right=change * told > 0, right_local=change * local > 0)[counted]
    shares = pairs.groupby("family")[["right", "right_local"]].mean()
    times = (cells["kl_nats"] / cells["kl_predicted_nats"]).groupby(cells["family"]).median()
    return shares.assign(times=times).sort_values("right")


def remarks(found: list[Text]) -> list[str]:
    """Return by how much more pairs are ordered rightly than locally, and where they are not."""
    told, local = (
        np.array([getattr(one.agreement, name) for one in found])
        for name in ("pairs_ordered", "pairs_ordered_local")
    )
    more = paired_difference(told, local, seed=0)
    ends = "" if more.low is None else f" [{more.low:+.3f}, {more.high:+.3f}]"
    worse = [one.name for one, is_more in zip(found, told > local, strict=True) if not is_more]
    return [
        f"pairs ordered rightly, above local error: {more.mean:+.3f}{ends}, mean over texts",
        f"texts on which it is not above: {', '.join(worse) or 'none'}",
    ]


def failures(whole: Agreement, found: list[Text]) -> list[str]:
    """Return the bounds that are missed."""
    missed = []
    if whole.spearman < SPEARMAN:
        missed.append(f"Spearman over all cells {whole.spearman:.3f} < {SPEARMAN}")
    if whole.pairs_ordered < PAIRS_ORDERED:
        missed.append(f"pairs ordered {whole.pairs_ordered:.3f} < {PAIRS_ORDERED}")
    if whole.pairs_ordered <= whole.pairs_ordered_local:
        missed.append(f"pairs ordered no better than locally ({whole.pairs_ordered_local:.3f})")
    missed += [
        f"Spearman within {one.name} {one.agreement.spearman:.3f} < {SPEARMAN_WITHIN}"
        for one in found
        if one.agreement.spearman < SPEARMAN_WITHIN
    ]
    return missed


def table(head: list[str], rows: list[list[str]], *, markdown: bool) -> str:
    """Return a table: words on the left, numbers on the right."""
    if markdown:
        rule = ["---", *["---:"] * (len(head) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    return "\n".join(
        "  ".join(
            one.rjust(width) if at else one.ljust(width)
            for at, (one, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *rows]
    )


def text_row(name: str, tokens: str, kl: str, found: Agreement) -> list[str]:
    """Return the line of a text, or of all."""
    shares = (
        found.spearman,
        found.spearman_local,
        found.pairs_ordered,
        found.pairs_ordered_local,
    )
    return [name, tokens, kl, *(f"{one:.3f}" for one in shares), str(found.num_pairs)]


def show(kv: pd.DataFrame, whole: Agreement, found: list[Text], *, markdown: bool) -> None:
    """Print the tables: by text, by bucket of the predicted KL, by policy."""
    head = ["text", "tokens, scored", "median KL", "Spearman", "local's", "pairs", "local's", "of"]
    rows = [
        text_row(
            one.name, f"{one.num_tokens}, {one.num_scored}", f"{one.kl_nats:.3f}", one.agreement
        )
        for one in found
    ]
    cells = counted_cells(calibration_cells(kv))
    rows.append(text_row("all", "", f"{cells['kl_nats'].median():.3f}", whole))
    print(f"\n{table(head, rows, markdown=markdown)}\n")
    found_of = statistics(kv)
    low = found_of[found_of["statistic"] == "propagated_over_predicted"]
    rows = [
        [str(row.group), f"{row.value:.2f}", str(row.num_cells)]
        for row in low.itertuples()
        if row.group != "all"
    ]
    head = ["predicted KL, nats a token", "propagated / predicted, median", "cells"]
    print(f"{table(head, rows, markdown=markdown)}\n")
    rows = [
        [str(name), f"{row.right:.3f}", f"{row.right_local:.3f}", f"{row.times:.2f}"]
        for name, row in by_policy(cells).iterrows()
    ]
    head = ["policy", "its pairs ordered rightly", "local's", "propagated / predicted, median"]
    print(f"{table(head, rows, markdown=markdown)}\n")


def measure(folder: Path, options: argparse.Namespace) -> int:
    """Record, run all levels, print, and return the exit code."""
    start = time.perf_counter()
    trace = options.trace or record(folder, options.tokens, options.probes)
    recorded = time.perf_counter()
    levels = ("local", "predicted", "propagated")
    plan = make_plan(options.policies, kept=options.kept, levels=levels, probe_block=BLOCK_ROWS)
    done = simulate_trace(trace, folder / "results", plan)
    if done.failed or done.skipped:
        sys.exit(f"cells failed or do not apply: {[*done.failed, *done.skipped]}")
    simulated = time.perf_counter()
    kv = pd.read_parquet(folder / "results" / "kv.parquet")
    whole, found = agreement(kv), by_text(kv, Trace(trace).sequences)
    missed = failures(whole, found)
    print(f"{len(options.policies)} policies at {options.kept} kept, {len(found)} texts: ", end="")
    print(f"{whole.num_cells} cells that evict, {whole.num_pairs} pairs at the same kept fraction")
    print(f"probes in blocks of {BLOCK_ROWS} rows; {about()}; ", end="")
    print(f"{recorded - start:.0f} s to record, {simulated - recorded:.0f} s for three levels")
    show(kv, whole, found, markdown=options.markdown)
    print("\n".join(remarks(found)))
    print("\n".join(f"MISSED: {one}" for one in missed) or "all bounds hold")
    if options.json:
        data = {
            "block_rows": BLOCK_ROWS,
            "about": about(),
            "all": asdict(whole),
            "texts": [asdict(one) for one in found],
            "calibration": json.loads(statistics(kv).to_json(orient="records")),
            "cells": json.loads(calibration_cells(kv).to_json(orient="records")),
            "missed": missed,
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(bool(missed))


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--kept", type=float, nargs="+", default=list(KEPT))
    parser.add_argument("--tokens", type=int, default=512, help="of each text; half is scored")
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--trace", type=Path, help="a trace with probes; default: record one")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, help="write statistics and cells here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
