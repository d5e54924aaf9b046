"""What ``trace.json`` says of a recording, and what the user is told before it."""

from __future__ import annotations

import datetime as dt
import platform
import sys
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from tracekit import schema
from tracekit.model.vocabulary import tokenizer_hash

if TYPE_CHECKING:
    from tracekit.model.load import LoadedModel
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompts import PromptFile


def make_manifest(loaded: LoadedModel, file: PromptFile, options: RecordOptions) -> dict[str, Any]:
    """Return the content of ``trace.json``; a run goes on only if ``settings`` and model agree."""
    packages = ("tracekit", "torch", "transformers", "numpy", "pyarrow")
    return {
        "schema_version": schema.SCHEMA_VERSION,
        "run_id": uuid.uuid4().hex,
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "device": str(loaded.model.device),
        },
        "versions": {name: version(name) for name in packages},
        "settings": {
            "prompts": file.name,
            "prompts_sha256": file.sha256,
            "capture": options.capture,
            "max_new_tokens": options.max_new_tokens,
            "limit": options.limit,
            "sampler": options.sampler.to_json(),
            "seed": options.seed,
            "dtype_store": options.dtype_store,
            "head": options.head,
        },
        "model": loaded.spec.to_json(),
        "tokenizer_sha256": tokenizer_hash(loaded.tokenizer),
    }


def notes(loaded: LoadedModel, options: RecordOptions) -> list[str]:
    """Return what the user should know before the run: what this model cannot give."""
    spec = loaded.spec
    if options.capture == "steps":
        return []
    unseen: dict[str, list[str]] = {}
    for layer in spec.layers:
        if layer.refusal or layer.kind == "untapped":
            unseen.setdefault(layer.refusal or "it cannot be seen", []).append(str(layer.index))
    told = [f"attention of layers {', '.join(at)} is left out: {why}" for why, at in unseen.items()]
    if not any(layer.num_heads and layer.refusal is None for layer in spec.layers):
        told.append(
            f"{spec.name} ({spec.model_type}) gives no attention: entropy and final hidden states "
            "are recorded, no queries, keys or values."
        )
    return told
