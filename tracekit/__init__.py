"""Record a language model once; replay any KV-cache eviction or vocabulary pruning on it, exactly.

The public names, loaded when first used:

``load_model``, ``read_prompts``, ``record_trace``, ``RecordOptions``, ``Sampler``
    record: run a model on prompts and write a trace.
``Trace``, ``validate_trace``
    read and check a trace.
``make_plan``, ``simulate_trace``
    simulate: replay policies and candidate sets on a trace.
``write_report``
    report: results to one HTML file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.model.load import load_model
    from tracekit.record.generate import Sampler
    from tracekit.record.options import RecordOptions
    from tracekit.record.prompts import read_prompts
    from tracekit.record.recorder import record as record_trace
    from tracekit.report.render import write_report
    from tracekit.simulate.plan import make_plan
    from tracekit.simulate.run import simulate as simulate_trace
    from tracekit.trace.reader import Trace
    from tracekit.trace.validate import validate as validate_trace

_PLACES = {
    "RecordOptions": ("tracekit.record.options", "RecordOptions"),
    "Sampler": ("tracekit.record.generate", "Sampler"),
    "Trace": ("tracekit.trace.reader", "Trace"),
    "load_model": ("tracekit.model.load", "load_model"),
    "make_plan": ("tracekit.simulate.plan", "make_plan"),
    "read_prompts": ("tracekit.record.prompts", "read_prompts"),
    "record_trace": ("tracekit.record.recorder", "record"),
    "simulate_trace": ("tracekit.simulate.run", "simulate"),
    "validate_trace": ("tracekit.trace.validate", "validate"),
    "write_report": ("tracekit.report.render", "write_report"),
}

__all__ = [
    "RecordOptions",
    "Sampler",
    "Trace",
    "load_model",
    "make_plan",
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
