"""``tracekit simulate --explain``: the strips of a head, in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tracekit.simulate.explain import Strip
    from tracekit.simulate.plan import Plan

CELLS = 80
"""Width of a strip."""

MOST_ROWS = 12
"""Steps of a strip that are drawn, the first and the last among them."""

_SHADES = " .:-=+*#"
"""From no entry kept to all of a cell's."""


def print_strips(folder: str, place: str, plan: Plan, *, as_json: bool) -> None:
    """Print which tokens the policies of a plan kept at ``SEQUENCE,LAYER,HEAD``."""
    from tracekit.cli.output import emit
    from tracekit.simulate.explain import explain
    from tracekit.trace.reader import Trace

    sequence_id, layer, head = _place(place)
    tokens, strips = explain(Trace(folder), sequence_id, layer, head, plan)
    data: dict[str, Any] = {
        "sequence": sequence_id,
        "layer": layer,
        "kv_head": head,
        "tokens": tokens,
        "policies": [
            {
                "policy": strip.policy,
                "point": strip.point,
                "decisions": list(strip.decisions),
                "evicted_at": [None if at < 0 else int(at) for at in strip.evicted_at_T],
            }
            for strip in strips
        ],
    }
    head_line = (
        f"{sequence_id}, layer {layer}, KV head {head}: {len(tokens)} tokens enter the cache"
    )
    parts = [head_line, *(_drawn(strip, tokens) for strip in strips)]
    if not strips:
        parts.append("no policy has an eviction point here, with a token before and after it.")
    emit(data, "\n\n".join(parts), as_json=as_json)


def _place(text: str) -> tuple[str, int, int]:
    """Return sequence, layer and head; a sequence's own name may hold commas."""
    from tracekit.errors import UsageError

    parts = text.rsplit(",", 2)
    try:
        sequence_id, layer, head = parts
        return sequence_id, int(layer), int(head)
    except ValueError:
        msg = f"--explain takes SEQUENCE,LAYER,HEAD, such as story-01#0,5,1, not {text!r}."
        raise UsageError(msg) from None


def _drawn(strip: Strip, tokens: list[str]) -> str:
    """Return one policy's strip, a row a step, and the text with what it lost in brackets."""
    num_tokens = len(tokens)
    steps = sorted({*strip.decisions, num_tokens})
    chosen = np.unique(np.linspace(0, len(steps) - 1, MOST_ROWS).round().astype(int))
    width = -(-num_tokens // CELLS)
    lines = [
        strip.policy,
        f"{'seen':>7} {'kept':>6}  one cell is {width} tokens; # all kept ... . few",
    ]
    for seen in (steps[place] for place in chosen):
        kept_T = strip.kept_T(seen)
        lines.append(f"{seen:>7} {int(kept_T.sum()):>6} |{_cells(kept_T, width, num_tokens)}|")
    gone = strip.evicted_at_T >= 0
    lines.append(f"text, with the {int(gone.sum())} tokens that were evicted in [ ]:")
    return "\n".join([*lines, *_wrapped(tokens, gone)])


def _cells(kept_T: np.ndarray, width: int, num_tokens: int) -> str:
    """Return a character for each ``width`` tokens; nothing where no token was seen yet."""
    cells = []
    for start in range(0, num_tokens, width):
        part = kept_T[start : start + width]
        share = part.mean() if len(part) else 0.0
        cells.append(_SHADES[int(np.ceil(share * (len(_SHADES) - 1)))])
    return "".join(cells)


def _wrapped(tokens: list[str], gone_T: np.ndarray) -> list[str]:
    """Return the tokens as lines of text, runs of evicted ones in brackets."""
    pieces, was_gone = [], False
    for token, gone in zip(tokens, gone_T.tolist(), strict=True):
        if gone != was_gone:
            pieces.append("[" if gone else "]")
        pieces.append("".join(char if char.isprintable() else " " for char in token))
        was_gone = gone
    text = "".join([*pieces, "]" if was_gone else ""])
    return [text[start : start + 96] for start in range(0, len(text), 96)]
