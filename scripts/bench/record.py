"""What recording costs: time and peak memory against plain generation, in one run.

Each measurement is a fresh process; variants alternate, medians are printed.

    python scripts/bench/record.py                                  # 512 new tokens
    python scripts/bench/record.py --new 2048
    python scripts/bench/record.py --prompt 2048 --new 64
    python scripts/bench/record.py --growth                         # prompts of 1 024 to 8 192
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from common import MODEL, fresh, peak_bytes, text_of

VARIANTS = ("plain", "hidden", "qkv", "outputs")
GROWTH = (1024, 2048, 4096, 8192)


def once(variant: str, num_prompt: int, num_new: int) -> dict[str, float]:
    """Run one variant in this process and measure it, everything included: deriving and writing."""
    import torch

    from tracekit.model.load import load_model
    from tracekit.record.generate import plain_config
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompt import Prompt
    from tracekit.record.prompts import PromptFile
    from tracekit.record.recorder import record

    loaded = load_model(MODEL)
    text = text_of(loaded, num_prompt)
    ids = loaded.tokenizer(text).input_ids
    loaded.model.generation_config.eos_token_id = None

    def plain(new: int, **extra: object) -> None:
        config = plain_config(loaded.model, new, None)
        config.update(**extra)
        input_ids = torch.tensor([ids])
        with torch.no_grad():
            loaded.model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
            )

    plain(2)
    outputs = dict.fromkeys(("output_attentions", "output_scores", "output_hidden_states"), True)
    if variant == "outputs":
        loaded.model.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if variant == "plain":
            plain(num_new)
        elif variant == "outputs":
            plain(num_new, return_dict_in_generate=True, **outputs)
        else:
            file = PromptFile("bench", (Prompt(id="one", domain="bench", text=text),), ())
            options = RecordOptions(capture=variant, max_new_tokens=num_new, head="omit")
            record(loaded, file, Path(folder) / "trace", options)
        wall_s = time.perf_counter() - start
    return {
        "wall_s": wall_s,
        "peak_bytes": peak_bytes(),
        "threads": torch.get_num_threads(),
        "prompt": len(ids),
    }


def measured(variant: str, num_prompt: int, num_new: int) -> dict[str, float]:
    """Measure one variant in a process of its own; no numbers if it failed, of memory mostly."""
    found = fresh(__file__, "--once", variant, "--prompt", str(num_prompt), "--new", str(num_new))
    return {"wall_s": float("nan"), "peak_bytes": float("nan")} | found


def measure(num_prompt: int, num_new: int, repeats: int, variants: list[str]) -> None:
    """Measure variants in alternation and print what they cost beside plain generation."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for _ in range(repeats):
        for variant in variants:
            found[variant].append(measured(variant, num_prompt, num_new))
    first = found["plain"][0]
    print(f"\n{first['prompt']:.0f} tokens of prompt, {num_new} new; ", end="")
    print(f"median of {repeats} alternated runs, {first['threads']:.0f} threads")
    print(f"{'variant':10} {'time, s':>10} {'of plain':>9} {'peak, MB':>10} {'over plain, MB':>15}")
    base = {
        key: statistics.median(one[key] for one in found["plain"])
        for key in ("wall_s", "peak_bytes")
    }
    for variant, runs in found.items():
        wall = statistics.median(one["wall_s"] for one in runs)
        peak = statistics.median(one["peak_bytes"] for one in runs)
        print(
            f"{variant:10} {wall:10.2f} {wall / base['wall_s']:9.3f} {peak / 1e6:10.0f} "
            f"{(peak - base['peak_bytes']) / 1e6:15.0f}"
        )


def growth(repeats: int) -> None:
    """Print how the time beyond the model's own grows with the length of a prompt."""
    print("one prompt, 2 new tokens, capture qkv; times in s, memory in MB over plain generation")
    header = ("tokens", "plain", "qkv", "beyond", "a pair of tokens, ns", "memory")
    print(("{:>7} {:>8} {:>8} {:>8} {:>22} {:>8}").format(*header))
    for length in GROWTH:
        runs = {
            name: [measured(name, length, 2) for _ in range(repeats)] for name in ("plain", "qkv")
        }
        wall = {
            name: statistics.median(one["wall_s"] for one in some) for name, some in runs.items()
        }
        peak = {name: max(one["peak_bytes"] for one in some) for name, some in runs.items()}
        beyond = wall["qkv"] - wall["plain"]
        print(
            f"{length:7} {wall['plain']:8.2f} {wall['qkv']:8.2f} {beyond:8.2f} "
            f"{beyond / (length**2 / 2) * 1e9:22.0f} {(peak['qkv'] - peak['plain']) / 1e6:8.0f}"
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--once", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.prompt, options.new)))
    elif options.growth:
        growth(options.repeats)
    else:
        measure(options.prompt, options.new, options.repeats, options.variants)


if __name__ == "__main__":
    main()
