"""Record a language model once; replay any KV-cache eviction or vocabulary pruning on it, exactly.

The public names, loaded when first used:

``load_model``, ``record_trace``, ``RecordOptions``, ``ProbeOptions``, ``Sampler``
    record: run a model and write a trace.
``read_prompts``, ``PromptSource``, ``TextSource``, ``ConversationSource``, ``Rendering``
    what it is run on: prompts to answer, texts or conversations to score.
``import_kld``
    a trace from the base file of llama.cpp's perplexity tool.
``Trace``, ``validate_trace``
    read and check a trace.
``make_plan``, ``make_sweep``, ``Inside``, ``simulate_trace``
    simulate: replay policies and candidate sets on a trace, or inside its model.
``write_report``
    report: results to one HTML file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.model.load import load_model
    from tracekit.record.kld import import_kld
    from tracekit.record.options import RecordOptions
    from tracekit.record.probe_options import ProbeOptions
    from tracekit.record.prompts import read_prompts
    from tracekit.record.recorder import record as record_trace
    from tracekit.record.rendering import Rendering
    from tracekit.record.sampler import Sampler
    from tracekit.record.sources.conversations import ConversationSource
    from tracekit.record.sources.prompts import PromptSource
    from tracekit.record.sources.text import TextSource
    from tracekit.report.render import write_report
    from tracekit.simulate.layer_plan import make_sweep
    from tracekit.simulate.plan import Inside, make_plan
    from tracekit.simulate.run import simulate as simulate_trace
    from tracekit.trace.reader import Trace
    from tracekit.trace.validate import validate as validate_trace

_PLACES = {
    "ConversationSource": ("tracekit.record.sources.conversations", "ConversationSource"),
    "Inside": ("tracekit.simulate.plan", "Inside"),
    "ProbeOptions": ("tracekit.record.probe_options", "ProbeOptions"),
    "PromptSource": ("tracekit.record.sources.prompts", "PromptSource"),
    "RecordOptions": ("tracekit.record.options", "RecordOptions"),
    "Rendering": ("tracekit.record.rendering", "Rendering"),
    "Sampler": ("tracekit.record.sampler", "Sampler"),
    "TextSource": ("tracekit.record.sources.text", "TextSource"),
    "Trace": ("tracekit.trace.reader", "Trace"),
    "import_kld": ("tracekit.record.kld", "import_kld"),
    "load_model": ("tracekit.model.load", "load_model"),
    "make_plan": ("tracekit.simulate.plan", "make_plan"),
    "make_sweep": ("tracekit.simulate.layer_plan", "make_sweep"),
    "read_prompts": ("tracekit.record.prompts", "read_prompts"),
    "record_trace": ("tracekit.record.recorder", "record"),
    "simulate_trace": ("tracekit.simulate.run", "simulate"),
    "validate_trace": ("tracekit.trace.validate", "validate"),
    "write_report": ("tracekit.report.render", "write_report"),
}

__all__ = [
    "ConversationSource",
    "Inside",
    "ProbeOptions",
    "PromptSource",
    "RecordOptions",
    "Rendering",
    "Sampler",
    "TextSource",
    "Trace",
    "import_kld",
    "load_model",
    "make_plan",
    "make_sweep",
    "read_prompts",
    "record_trace",
    "simulate_trace",
    "validate_trace",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PLACES:
        msg = f"module 'tracekit' has no attribute {name!r}"
        raise AttributeError(msg)
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
