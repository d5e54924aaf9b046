"""Memory: what a request holds, how many fit beside the weights, and where each byte is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit.report.blocks import Absent, Block, Details, Section, Text
from tracekit.report.figures.memory import memory_by_requests, memory_by_tokens
from tracekit.report.formats import count, percent, size
from tracekit.report.memory.held import memory_of
from tracekit.report.memory.tables import accounts, buckets, recall
from tracekit.report.tables import Column, HtmlTable, build, text_column

if TYPE_CHECKING:
    from tracekit.report.load import Point, Results
    from tracekit.report.memory.held import Held, Memory
    from tracekit.report.options import Options
    from tracekit.spec import ModelSpec


def section(results: Results, options: Options) -> Section | Absent:
    """Return what the cache takes and what policies leave of it."""
    if not results.levels:
        return Absent(
            what="Memory by policy: no KV policy was replayed.",
            command="tracekit simulate TRACE -o RESULTS --kv h2o --kv snapkv",
        )
    memory, spec = memory_of(results), results.spec
    room = _room(spec, options)
    blocks: list[Block] = [Text(text=_verdict(memory), look="verdict")]
    blocks += [Text(text=text, look="note") for text in (_device(spec, options), *_uncounted(spec))]
    blocks += [
        memory_by_tokens(results, memory),
        memory_by_requests(results, memory, room),
        _fits(memory, room),
        *buckets(results, memory),
        *recall(results, memory.level),
        Details(
            summary="What is held, read and remembered, policy by policy",
            blocks=(accounts(results, memory.level),),
        ),
    ]
    return Section(name="memory", title="Memory", short="Memory", blocks=tuple(blocks))


def _verdict(memory: Memory) -> str:
    full = memory.full.request_bytes(memory.longest_tokens)
    text = (
        f"One request of {count(memory.longest_tokens)} tokens takes {size(full)} of cache, "
        f"{size(memory.full.token_bytes(0))} for a token"
    )
    lasting = [one for one in memory.groups if one.repeats]
    if not lasting:
        return f"{text}; no policy here evicts again and again, so none has a fraction for that length."
    least = lasting[0]
    held = least.request_bytes(memory.full, memory.longest_tokens)
    return (
        f"{text}; {least.name} would hold {size(held)} of it (kept {percent(least.first.mean, 1)} as measured, "
        f"level {memory.level}, {_interval(least.first)})."
    )


def _device(spec: ModelSpec, options: Options) -> str:
    """Return what is planned for."""
    weights = spec.num_weight_bytes
    has = (
        "the size of the weights is not known and not subtracted"
        if weights is None
        else f"the weights take {size(weights)} in {spec.dtype}, as they were loaded"
    )
    if options.memory_bytes is None:
        return f"No device is named, so no limit is drawn: tracekit report RESULTS --memory 80GiB draws it; {has}."
    room = options.memory_bytes - (weights or 0)
    rest = f"{size(room)} are left for caches" if room > 0 else "nothing is left for caches"
    return (
        f"The device has {size(options.memory_bytes)}; {has}; {rest}. Activations, the allocator and the state of "
        "a policy come on top."
    )


def _uncounted(spec: ModelSpec) -> list[str]:
    """Return what closed forms here leave out."""
    kinds = {"linear": "states of linear layers", "untapped": "attention that cannot be seen"}
    told = [
        f"Not counted: {what}, {number_of} of {len(spec.layers)} layers."
        for kind, what in kinds.items()
        if (number_of := sum(layer.kind == kind for layer in spec.layers))
    ]
    refused = sum(layer.refusal is not None for layer in spec.layers)
    if refused:
        told.append(
            f"{refused} of {len(spec.layers)} layers cannot be replayed; they are counted by the keys and values "
            "that their attention sees, and a compressed cache holds less."
        )
    return told


def _room(spec: ModelSpec, options: Options) -> float | None:
    if options.memory_bytes is None:
        return None
    return options.memory_bytes - (spec.num_weight_bytes or 0)


def _fits(memory: Memory, room: float | None) -> HtmlTable:
    """Return what one request takes and, on a device, how many fit."""
    tokens = memory.longest_tokens
    full = memory.full.request_bytes(tokens)
    held = [("full cache", "closed form", full, full)]
    for one in memory.groups:
        request = one.request_bytes(memory.full, tokens)
        peak = request if one.num_budget_tokens is not None else one.peak_frac * full
        held.append((", ".join(one.families), _measured(one), request, peak))
    rows: list[list[Any]] = [[*row] for row in held]
    columns = [
        text_column("policy"),
        text_column("by"),
        Column("one request", size),
        Column("at its peak", size),
    ]
    if room is not None:
        columns += [Column("requests that fit", count), Column("at their peaks", count)]
        rows = [[*row, _quotient(room, row[2]), _quotient(room, row[3])] for row in held]
    return build(
        "table-fits",
        f"Requests of {count(tokens)} tokens; kept and peak fractions are means over sequences, level "
        f"{memory.level}, measured at the recorded lengths",
        columns,
        rows,
    )


def _measured(held: Held) -> str:
    """Return where a policy's bytes come from."""
    first = held.first
    text = f"kept {percent(first.mean, 1)} ({_interval(first)})"
    if held.num_budget_tokens is not None:
        text = f"{count(held.num_budget_tokens)} tokens"
    if held.repeats:
        return text
    return f"{text}, {'acts once' if held.first.asked < 1 else 'transform, nothing evicted'}"


def _interval(point: Point) -> str:
    if np.isnan(point.low):
        return f"no interval below 3 sequences, n\u00a0=\u00a0{point.n}"
    return f"95\u00a0% {percent(point.low, 1)} to {percent(point.high, 1)}, n\u00a0=\u00a0{point.n}"


def _quotient(room: float, one: float) -> float:
    return max(0.0, room) // one if one > 0 else np.nan
