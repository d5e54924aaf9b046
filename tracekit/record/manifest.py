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
    from collections.abc import Mapping

    from tracekit.model.load import LoadedModel
    from tracekit.record.options import RecordOptions
    from tracekit.record.source import Source


def make_manifest(loaded: LoadedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
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
        "settings": dict(settings),
        "model": loaded.spec.to_json(),
        "tokenizer_sha256": tokenizer_hash(loaded.tokenizer),
    }


def recording_settings(
    loaded: LoadedModel, source: Source, options: RecordOptions
) -> dict[str, Any]:
    """Return all that decides what a recording holds."""
    return {
        "source": source.name,
        "source_sha256": source.sha256,
        **source.settings(),
        "capture": options.capture,
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "prefill_chunk": options.prefill_chunk,
        "sampler": options.sampler.to_json(),
        "seed": options.seed,
        "dtype_store": options.dtype_store,
        "maps": sorted(options.wanted(loaded.spec).maps),
        "attention_topk": options.attention_topk,
        "hidden_layers": list(options.residual_layers(loaded.spec)),
        "head": options.head,
        "store_oproj": options.store_oproj,
        "probes": options.probes.to_json(loaded.spec) if options.capture == "influence" else None,
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
