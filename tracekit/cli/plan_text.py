"""A plan in words and two tables: what one request takes, what fits, what to do first."""

from __future__ import annotations

import textwrap
from typing import Any

from tracekit.cli.output import WIDTH, number, range_text, table
from tracekit.cli.sizes import gib_text, size_text

_MOST_COLUMNS = 4
"""Kept fractions beside the full cache in the table of batches; --json has all."""

_NO_END = "no end"


def text_of(data: dict[str, Any]) -> str:
    """Return a plan as text for people."""
    parts = [_wrapped(_facts(data)), _requests(data), _batches(data), _wrapped(_first(data))]
    return "\n\n".join(part.strip("\n") for part in parts)


def _wrapped(lines: list[str]) -> str:
    """Return lines of at most the usual width, continued ones set in."""
    return "\n".join(textwrap.fill(one, WIDTH, subsequent_indent="  ") for one in lines)


def _facts(data: dict[str, Any]) -> list[str]:
    """Return what is planned for, and what is not counted."""
    first, following = data["first_token_bytes"], data["next_token_bytes"]
    past = "" if first == following else f"; {size_text(following)} once its windows are full"
    lines = [
        data["model"],
        f"a token adds {size_text(first)}{past}, at {data['bytes_per_number']:g} bytes a number",
    ]
    if data["state_bytes"]:
        lines.append(
            f"a request has states of {size_text(data['state_bytes'])} besides, in bfloat16; no policy "
            "frees them, but the kept fraction is taken of keys and values alone"
        )
    lines.append(_weights(data))
    longest = data["longest_tokens"]
    if longest is not None and data["context_tokens"] > longest:
        lines.append(
            f"beware: the model was made for {longest:,} tokens, not {data['context_tokens']:,}"
        )
    most = max((row["longest_tokens"] or 0 for row in data["rows"]), default=0)
    if longest is not None and most > longest:
        lines.append(
            f"beware: more than {longest:,} tokens fit here, but the model was not made for them"
        )
    if data["measured_on"] is not None:
        lines.append(
            f"kept fractions as measured on {data['measured_on']}, on sequences of other lengths; a policy "
            "that evicts once keeps all later tokens, so that its fraction depends on the answer's length"
        )
    else:
        lines.append("kept fractions as asked for, not measured: --results takes measured ones")
    return lines


def _weights(data: dict[str, Any]) -> str:
    weights, memory = data["weight_bytes"], data["memory_bytes"]
    has = "weights: size not known" if weights is None else f"weights {size_text(weights)}"
    if weights is not None and data["dtype"] is not None:
        has += f" in {data['dtype']}"
    if memory is None:
        return f"{has}; --memory says what fits"
    if weights is None:
        has += " and not subtracted (--weights-bytes)"
    return (
        f"{has}; memory {size_text(memory)}; left for caches {size_text(max(0, data['room_bytes']))}, "
        "less what activations, the allocator and a policy's own state take"
    )


def _requests(data: dict[str, Any]) -> str:
    """Return the table of one request, one row a kept fraction."""
    rows, has_memory = data["rows"], data["memory_bytes"] is not None
    is_measured = any(row["n"] is not None for row in rows)
    columns: dict[str, list[str]] = {
        "cache": [row["name"] for row in rows],
        "kept": [range_text(row["kept_frac"], row["low"], row["high"], 2) for row in rows],
    }
    if is_measured:
        columns["n"] = [number(row["n"]) for row in rows]
        columns["peak"] = [number(row["peak_frac"]) for row in rows]
    columns["one request"] = [gib_text(row["request_bytes"]) for row in rows]
    if has_memory:
        columns["requests"] = [_count(row["requests"]) for row in rows]
        if is_measured:
            columns["at peak"] = [_count(row["requests_at_peak"]) for row in rows]
        name = f"tokens at batch {data['batch']}"
        columns[name] = [_count(row["longest_tokens"]) for row in rows]
    if is_measured:
        columns["cost"] = [_cost(row) for row in rows]
    of = next((row["cost_of"] for row in rows if row["cost_of"]), None)
    title = f"one request of {data['context_tokens']:,} tokens: full {_full(data)}"
    if of is not None:
        level = next(row["level"] for row in rows if row["level"])
        title += f"; kept with 95 % interval, level {level}; cost: {of} (n)"
    return table(title, list(columns), list(zip(*columns.values(), strict=True)), gap=2)


def _full(data: dict[str, Any]) -> str:
    return size_text(data["rows"][0]["request_bytes"])


def _cost(row: dict[str, Any]) -> str:
    return "-" if row["cost"] is None else f"{number(row['cost'], 2)} ({row['cost_n']})"


def _count(value: int | None) -> str:
    return _NO_END if value is None else f"{value:,}"


def _batches(data: dict[str, Any]) -> str:
    """Return the table of batches: the bytes of all caches, and what does not fit."""
    rows, room = data["rows"][: 1 + _MOST_COLUMNS], data["room_bytes"]
    left_out = len(data["rows"]) - len(rows)
    title = f"all caches of a batch, {data['context_tokens']:,} tokens each"
    if room is not None:
        title += "; + does not fit"
    if left_out:
        title += f"; {left_out} more with --json"
    cells = [
        [size, *(_cell(row["batches"][size], room) for row in rows)] for size in rows[0]["batches"]
    ]
    return table(title, ["batch", *(row["name"] for row in rows)], cells, gap=2)


def _cell(num_bytes: float, room: float | None) -> str:
    return gib_text(num_bytes) + (" +" if room is not None and num_bytes > room else "")


def _first(data: dict[str, Any]) -> list[str]:
    """Return what to do first, and at what length a cache begins to matter: numbers, no rule."""
    return [_advice(data), *_shares(data)]


def _advice(data: dict[str, Any]) -> str:
    full, batch = data["rows"][0], data["batch"]
    best = min(data["rows"], key=lambda row: row["request_bytes"])
    needed = size_text(full["batches"][str(batch)] + (data["weight_bytes"] or 0))
    if data["memory_bytes"] is None:
        return f"batch {batch} needs {needed} with the full cache; --memory says whether it fits."
    if full["requests"] is None:
        return "first: nothing of this cache grows or takes room; no policy can free memory."
    to_kept = f"{best['name']} makes it {_count(best['requests'])}"
    if best["cost"] is not None:
        to_kept += (
            f", at a cost of {number(best['cost'], 2)} ({best['cost_of']}, n = {best['cost_n']})"
        )
    if not full["requests"]:
        return f"first: not one full cache of this length fits beside the weights; {to_kept}."
    spend = (
        f"first: spend the memory on batch. {full['requests']:,} requests fit in full, and each step "
        f"reads the weights once for all of them; {to_kept}."
    )
    fits = "fits" if full["requests"] >= batch else "does not fit"
    return f"{spend} Batch {batch} needs {needed} with the full cache: it {fits}."


def _shares(data: dict[str, Any]) -> list[str]:
    """Return how much of what a step reads the full caches are, at two lengths."""
    weights, batch = data["weight_bytes"], data["batch"]
    if not weights or not data["rows"][0]["request_bytes"]:
        return []
    at = {
        data["claimed_tokens"]: data["claimed_cache_bytes"],
        data["context_tokens"]: data["rows"][0]["request_bytes"],
    }
    told = " and ".join(
        f"{batch * one / (batch * one + weights):.0%} at {tokens:,}"
        for tokens, one in sorted(at.items())
    )
    claim = f"eviction is said to pay above about {data['claimed_tokens']:,} tokens"
    return [
        f"{claim}: here, at batch {batch}, full caches are {told} tokens of what caches and weights take together."
    ]
