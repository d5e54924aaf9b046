"""What a report costs: seconds of a fresh process, bytes of the page, and the share of each section.

    python scripts/bench/report.py                              # 40 sequences, 10 policies
    python scripts/bench/report.py --sequences 200 --policies 40
    python scripts/bench/report.py --keep FOLDER                # results stay there, to be used again
    python scripts/bench/report.py --results RESULTS            # of a results folder that is there

Without results, a random model of 30 layers is recorded and simulated first: three levels of truth,
four kept fractions, layers and KV heads, the usual estimators at six sizes, attention. That is done
for 10 sequences; their rows, repeated under other names, stand for the rest. Means and intervals
stay those of the 10, which costs a report nothing and tells nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, fresh, peak_bytes

POLICIES = (
    *("random", "streaming", "h2o", "tova", "snapkv", "adakv", "knorm", "expected", "oracle"),
    *("int4", "observed", "keydiff", "lagkv", "leverage", "pyramidkv", "adapyramid", "cake"),
    *("caote", "cur", "finch", "noncausal", "rkv", "scissorhands", "sinkuniform", "keepodd"),
    *("compactor", "quest", "simlayerkv", "oracle_error"),
)
"""Policies in the order in which they are taken; beyond them come windows of snapkv."""

KEPT = (0.1, 0.25, 0.5, 0.75)
SIMULATED = 10  # Sequences.
FEW = ("shown", "held", "timings")  # Tables of some sequences, whatever their number.
SIZES = (16, 32, 64, 96, 128, 256)  # Of 272 tokens.
WORDS = (
    "the",
    "river",
    "ran",
    "low",
    "and",
    "nobody",
    "could",
    "say",
    "why",
    "it",
    "had",
    "changed",
)
DOMAINS = ("story", "code", "translation", "dialogue", "summary", "arithmetic", "retrieval")


def simulate_into(folder: Path, num_sequences: int, num_policies: int) -> None:
    """Record a random model of 30 layers, simulate all that a report shows, and repeat it."""
    sys.path.insert(0, str(ROOT))
    from tests import tiny
    from tracekit.record.options import RecordOptions
    from tracekit.record.recorder import record
    from tracekit.simulate.layer_plan import make_sweep
    from tracekit.simulate.plan import VOCAB, make_plan
    from tracekit.simulate.run import simulate

    model, prompts = folder / "model", folder / "prompts.jsonl"
    tiny.model(num_hidden_layers=30).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    rows = (json.dumps(_prompt(number)) + "\n" for number in range(min(num_sequences, SIMULATED)))
    prompts.write_text("".join(rows), encoding="utf-8")
    options = RecordOptions(capture="influence", max_new_tokens=24)
    record(str(model), str(prompts), folder / "trace", options)
    plan = make_plan(
        policies(num_policies),
        VOCAB,
        kept=KEPT,
        sizes=SIZES,
        attention=True,
        levels=("local", "predicted", "propagated"),
        sweep=make_sweep(("snapkv",), kept=("0.3",), heads=True),
    )
    simulate(folder / "trace", folder / "results", plan)
    repeat(folder / "results", num_sequences)


def repeat(results: Path, num_sequences: int) -> None:
    """Let every sequence stand in the tables under so many names that there are as many as wanted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = json.loads((results / "run.json").read_text(encoding="utf-8"))
    times = -(-num_sequences // len(run["sequences"]))
    run["sequences"] = [
        one | {name: one[name] + _name(time) for name in ("sequence_id", "prompt_id")}
        for time in range(times)
        for one in run["sequences"]
    ]
    (results / "run.json").write_text(json.dumps(run), encoding="utf-8")
    for path in sorted(results.glob("*.parquet")):
        table = pq.read_table(path)
        if path.stem in FEW or "sequence_id" not in table.column_names:
            continue
        place = table.column_names.index("sequence_id")
        codes = table["sequence_id"].cast(pa.string()).combine_chunks().dictionary_encode()
        with pq.ParquetWriter(path, table.schema) as file:
            for time in range(times):
                names = [name + _name(time) for name in codes.dictionary.to_pylist()]
                made = pa.DictionaryArray.from_arrays(codes.indices, names)
                field = table.schema.field(place)
                file.write_table(table.set_column(place, field, made.cast(field.type)))


def _name(time: int) -> str:
    return f"+{time}" if time else ""


def policies(most: int) -> list[str]:
    """Return the texts of so many policies, all of which this model can run."""
    more = (f"snapkv:window={window}" for window in range(2, 2 + most))
    return [*POLICIES, *more][:most]


def _prompt(number: int) -> dict[str, Any]:
    """Return a prompt of 40 to 130 tokens; those of retrieval have a needle."""
    words = [WORDS[(number + 3 * place) % len(WORDS)] for place in range(8 + number % 17)]
    one = {"id": f"p{number:03}", "domain": DOMAINS[number % len(DOMAINS)]}
    if one["domain"] != "retrieval":
        return one | {"prompt": " ".join(words)}
    note = f"{' '.join(words)}; the code is {number}; {' '.join(words)}"
    spans = [{"kind": "needle", "text": str(number)}]
    return one | {"context": note, "question": "What is the code?", "spans": spans}


def once(results: Path) -> dict[str, Any]:
    """Write one report in this process: seconds with all imports, seconds and bytes a section."""
    start = time.perf_counter()
    from tracekit.report import sections as parts
    from tracekit.report import write_report
    from tracekit.report.blocks import Section

    seconds: dict[str, float] = {}

    def timed(make: Any) -> Any:
        def run(*arguments: Any) -> Any:
            begun = time.perf_counter()
            made = make(*arguments)
            name = made.name if isinstance(made, Section) else "absent"
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
            return made

        return run

    parts.ORDER = tuple(map(timed, parts.ORDER))
    with tempfile.TemporaryDirectory() as folder:
        html = write_report(results, Path(folder) / "report.html").read_text(encoding="utf-8")
        files = sum(path.stat().st_size for path in Path(folder).rglob("*-files/*"))
    sizes = {
        found[1]: len(found[0].encode("utf-8"))
        for found in re.finditer(r'<section id="([^"]*)".*?</section>', html, re.DOTALL)
    }
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time(),
        "peak_bytes": peak_bytes(),
        "html_bytes": len(html.encode("utf-8")),
        "file_bytes": files,
        "seconds": seconds,
        "bytes": sizes,
    }


def show(results: Path, repeats: int) -> None:
    """Measure in fresh processes and print medians."""
    runs = [fresh(__file__, "--once", str(results)) for _ in range(repeats)]
    if any("failed" in one for one in runs):
        sys.exit(1)
    middle = {
        name: statistics.median(one[name] for one in runs)
        for name in ("wall_s", "cpu_s", "peak_bytes")
    }
    first = runs[0]
    run = json.loads((results / "run.json").read_text(encoding="utf-8"))
    print(
        f"{len(run['sequences'])} sequences, {len(run['plan']['kv'])} policies and sizes; ", end=""
    )
    print(f"median of {repeats} fresh processes, {os.environ['OMP_NUM_THREADS']} thread")
    print(
        f"{middle['wall_s']:.1f} s ({middle['cpu_s']:.1f} of CPU), {middle['peak_bytes'] / 1e6:.0f} MB of memory; ",
        end="",
    )
    print(f"page {first['html_bytes'] / 1e6:.2f} MB, files {first['file_bytes'] / 1e6:.2f} MB\n")
    print(f"{'section':16}{'s':>7}{'kB':>8}{'of page':>9}")
    for name, num_bytes in first["bytes"].items():
        took = statistics.median(one["seconds"].get(name, float("nan")) for one in runs)
        print(f"{name:16}{took:7.2f}{num_bytes / 1e3:8.0f}{num_bytes / first['html_bytes']:9.1%}")


def main() -> None:
    """Parse the command line; the measuring processes are this script again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=40)
    parser.add_argument("--policies", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="what to report, instead of making it")
    parser.add_argument("--keep", type=Path, help="folder for what is made; default: none is kept")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.once:
        print(json.dumps(once(options.once)))
    elif options.results:
        show(options.results, options.repeats)
    else:
        with tempfile.TemporaryDirectory() as place:
            folder = options.keep or Path(place)
            folder.mkdir(parents=True, exist_ok=True)
            # Elsewhere: peak memory is handed on to the processes that are measured.
            made = (folder, options.sequences, options.policies)
            making = multiprocessing.get_context("spawn").Process(target=simulate_into, args=made)
            making.start()
            making.join()
            if making.exitcode:
                sys.exit(1)
            show(folder / "results", options.repeats)


if __name__ == "__main__":
    main()
