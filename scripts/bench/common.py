"""What the benchmarks share: real text, traces of it, kvpress, and processes of their own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = "smollm2-135m"
ROOT = Path(__file__).resolve().parents[2]
PARITY = ROOT / "scripts" / "parity"


def ids_of(loaded: Any, num_tokens: int) -> list[int]:
    """Return the first so many token ids of real text."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = loaded.tokenizer(text).input_ids[:num_tokens]
    return ids


def text_of(loaded: Any, num_tokens: int) -> str:
    """Return real text of so many tokens."""
    return str(loaded.tokenizer.decode(ids_of(loaded, num_tokens)))


def make_trace(folder: Path, num_prompt: int, num_new: int, capture: str = "qkv") -> None:
    """Record a model that goes on from a text, or, of no new tokens, the text as it is.

    A text's prompt is said to end in the middle.
    """
    from tracekit.model.load import load_model
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompt import Prompt
    from tracekit.record.prompts import PromptFile
    from tracekit.record.recorder import record
    from tracekit.record.sources.text import TextSource

    loaded = load_model(MODEL)
    loaded.model.generation_config.eos_token_id = None
    options = RecordOptions(capture=capture, max_new_tokens=num_new, head="omit")
    if num_new:
        prompt = Prompt(id="one", domain="bench", text=text_of(loaded, num_prompt))
        record(loaded, PromptFile("bench", (prompt,), ()), folder, options)
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "topics.txt"
        path.write_text(text_of(loaded, 2 * num_prompt))
        record(loaded, TextSource(path, window=num_prompt, limit=1), folder, options)


def about() -> str:
    """Return what a time depends on: threads and versions."""
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{torch.get_num_threads()} threads, {versions}"


def run_kvpress(
    prompt: Sequence[int], rest: Sequence[int], cells: Sequence[tuple[str, dict[str, Any], float]]
) -> dict[str, Any]:
    """Let kvpress run cells (name, press, kept fraction) in an environment of its own.

    See ``scripts/parity/side/cells.py`` for what a press is, and for what comes back.
    """
    from tracekit.model.builtin import BUILTIN_MODELS, find_builtin
    from tracekit.model.convert import converted

    making = [sys.executable, str(PARITY / "environment.py")]
    made = subprocess.run(making, check=True, stdout=subprocess.PIPE, text=True)
    job = {
        "model": str(converted(find_builtin(MODEL), sha256=BUILTIN_MODELS[MODEL].sha256)),
        "prompt": list(prompt),
        "rest": list(rest),
        "cells": cells,
    }
    command = [made.stdout.splitlines()[-1], str(PARITY / "side" / "cells.py")]
    done = subprocess.run(
        command, check=False, input=json.dumps(job), stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"kvpress's side ended with {done.returncode}: see its words above.")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fresh(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a process of its own and return the JSON object of its last line.

    Where it failed, there is only a ``failed`` in it: what was measured before must not be lost.
    """
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(arguments)} ended with {done.returncode}", file=sys.stderr)
        print(done.stderr[-2000:], file=sys.stderr)
        return {"failed": done.returncode}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
