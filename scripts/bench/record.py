"""What recording costs: time and peak memory against plain generation, in one run.

Each measurement is a fresh process; variants alternate, medians are printed.

    python scripts/bench/record.py
    python scripts/bench/record.py --prompt 1984 --new 64 --sequences 1
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANTS = ("plain", "hidden", "qkv", "outputs")
WORDS = "The river kept its own calendar, and the town had learned to read it. "


def prompt_of(loaded, num_tokens: int) -> str:
    """Return text of about so many tokens."""
    length = len(loaded.tokenizer(WORDS).input_ids)
    return (WORDS * (num_tokens // length + 1)).strip()


def once(variant: str, num_prompt: int, num_new: int, num_sequences: int) -> dict[str, float]:
    """Run one variant in this process and measure it, everything included: deriving and writing."""
    import torch

    from tracekit.model.load import load_model
    from tracekit.record.generate import Sampler
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompt import Prompt
    from tracekit.record.prompts import PromptFile
    from tracekit.record.recorder import record

    loaded = load_model("smollm2-135m")
    ids = loaded.tokenizer(prompt_of(loaded, num_prompt)).input_ids[:num_prompt]
    text = loaded.tokenizer.decode(ids)
    loaded.model.generation_config.eos_token_id = None
    sampler = Sampler()

    def plain(new: int, **extra: object) -> None:
        config = sampler.generation_config(loaded.model, new)
        config.update(**extra)
        input_ids = torch.tensor([loaded.tokenizer(text).input_ids])
        with torch.no_grad():
            loaded.model.generate(
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config
            )

    plain(4)
    outputs = dict.fromkeys(("output_attentions", "output_scores", "output_hidden_states"), True)
    if variant == "outputs":
        loaded.model.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if variant == "plain":
            for _ in range(num_sequences):
                plain(num_new)
        elif variant == "outputs":
            for _ in range(num_sequences):
                plain(num_new, return_dict_in_generate=True, **outputs)
        else:
            names = (f"bench-{number}" for number in range(num_sequences))
            prompts = tuple(Prompt(id=name, domain="bench", text=text) for name in names)
            file = PromptFile(name="bench", prompts=prompts, bad=())
            options = RecordOptions(capture=variant, max_new_tokens=num_new, head="omit")
            record(loaded, file, Path(folder) / "trace", options)
        wall_s = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"wall_s": wall_s, "peak_bytes": peak_bytes, "threads": torch.get_num_threads()}


def measure(num_prompt: int, num_new: int, num_sequences: int, repeats: int) -> None:
    """Measure all variants in alternation and print ratios."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--once", variant]
            command += ["--prompt", str(num_prompt), "--new", str(num_new)]
            command += ["--sequences", str(num_sequences)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[variant].append(json.loads(output.splitlines()[-1]))
    threads = found["plain"][0]["threads"]
    print(f"\n{num_sequences} sequences: {num_prompt} tokens of prompt, {num_new} new; ", end="")
    print(f"median of {repeats} alternated runs, {threads:.0f} threads")
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


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=3)
    parser.add_argument("--once", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.prompt, options.new, options.sequences)))
    else:
        measure(options.prompt, options.new, options.sequences, options.repeats)


if __name__ == "__main__":
    main()
