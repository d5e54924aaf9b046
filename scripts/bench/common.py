"""What the benchmarks share: real text, traces of it, and processes of their own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"


def text_of(loaded: Any, num_tokens: int) -> str:
    """Return real text of so many tokens."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = loaded.tokenizer.decode(loaded.tokenizer(text).input_ids[:num_tokens])
    return str(text)


def make_trace(folder: Path, num_prompt: int, num_new: int) -> None:
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
    options = RecordOptions(capture="qkv", max_new_tokens=num_new, head="omit")
    if num_new:
        prompt = Prompt(id="one", domain="bench", text=text_of(loaded, num_prompt))
        record(loaded, PromptFile("bench", (prompt,), ()), folder, options)
        return
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "topics.txt"
        path.write_text(text_of(loaded, 2 * num_prompt))
        record(loaded, TextSource(path, window=num_prompt, limit=1), folder, options)


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
