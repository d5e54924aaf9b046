"""``tracekit plan``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli.sizes import parse_size, parse_tokens

if TYPE_CHECKING:
    from tracekit.cli.plan_numbers import PlannedModel
    from tracekit.report.load import Results
    from tracekit.spec import ModelSpec

_USUAL_BATCH = 8
_USUAL_BYTES = 2.0

LEAST_KEPT = 1e-6
"""The least kept fraction that is planned for: one token of a million."""

LEAST_BYTES, LARGEST_BYTES = 1 / 16, 8.0
"""Bytes a number: half a bit, and a double."""

MOST_HEADS = MOST_NUMBERS = 65_536
"""KV heads of a layer, and numbers of a head, at most."""

MOST_REQUESTS = 1_000_000
"""Requests at once, at most."""


def plan(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, config.json, built-in name or hub id; no weights are read."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Instead of --model: layers.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="With --layers: KV heads a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="With --layers: numbers a head.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens a request: 64k, 8192. Default: the model's longest.")
    ] = None,
    kept: Annotated[str, typer.Option(help="Kept fractions of the cache: 0.3 or 0.1,0.3.")] = "0.3",
    memory: Annotated[
        str | None, typer.Option(help="Memory of the device: 80GiB, 24GB (not the same unit).")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Requests at once. Default: 8, and a table from 1 to 64.")
    ] = None,
    number_bytes: Annotated[
        float | None,
        typer.Option(
            "--bytes",
            help="Bytes a number: 2 float16, 1 int8, 0.5 int4.",
            show_default="2, or those of the results",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Take the kept fractions that policies had here, nearest to --kept."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="With --results: this policy alone, by its name or text.")
    ] = None,
    weights_bytes: Annotated[
        str | None, typer.Option(help="Size of the weights, where it is not that of the config.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Say how many requests fit beside the weights and how long they may be, full and kept.

    Beware of a figure that is passed on: 32 layers x 40 KV heads of 64, 64 K tokens, 2 bytes a number
    are 21.5 GB, not 34.4: tracekit plan --layers 32 --kv-heads 40 --head-dim 64 --context 64k
    """
    from tracekit.cli.output import emit
    from tracekit.cli.plan_numbers import asked, measured, planned
    from tracekit.cli.plan_text import text_of
    from tracekit.errors import UsageError
    from tracekit.report.load import load_results

    if policy is not None and results is None:
        msg = "--policy names a policy of measured results: give --results as well."
        raise UsageError(msg)
    _check_count("--batch", batch, MOST_REQUESTS)
    loaded = None if results is None else load_results(results)
    usual_bytes = _USUAL_BYTES if loaded is None else float(loaded.run["plan"]["kv_bytes"])
    number_bytes = usual_bytes if number_bytes is None else _number_bytes(number_bytes)
    found = _model(model, (layers, kv_heads, head_dim), loaded)
    if weights_bytes is not None:
        found = dataclasses.replace(found, weight_bytes=parse_size(weights_bytes))
    fractions = _fractions(kept)
    data = planned(
        found,
        asked(fractions)
        if loaded is None
        else measured(loaded, fractions, policy, number_bytes=number_bytes),
        num_tokens=_context(context, found),
        memory_bytes=None if memory is None else parse_size(memory),
        batch=_USUAL_BATCH if batch is None else batch,
        number_bytes=number_bytes,
    )
    data["measured_on"] = None if loaded is None else loaded.spec.name
    emit(data, text_of(data), as_json=as_json)


def _check_count(option: str, given: int | None, most: int) -> None:
    """Refuse what is no count, or larger than anything that is planned for."""
    from tracekit.errors import UsageError

    if given is not None and not 1 <= given <= most:
        msg = f"{option} is at least 1 and at most {most:,}."
        raise UsageError(msg)


def _number_bytes(number: float) -> float:
    from tracekit.errors import UsageError

    if not LEAST_BYTES <= number <= LARGEST_BYTES:
        msg = (
            f"--bytes is at least {LEAST_BYTES:g} and at most {LARGEST_BYTES:g}, unlike {number:g}."
        )
        raise UsageError(msg)
    return number


def _model(
    name: str | None, sizes: tuple[int | None, int | None, int | None], results: Results | None
) -> PlannedModel:
    """Return what is planned for: a named model, given sizes, or the recorded model."""
    from tracekit.cli.plan_numbers import PlannedModel
    from tracekit.errors import UsageError
    from tracekit.measure.memory import MOST_LAYERS, CacheShape

    options = ("--layers", "--kv-heads", "--head-dim")
    for option, size, most in zip(
        options, sizes, (MOST_LAYERS, MOST_HEADS, MOST_NUMBERS), strict=True
    ):
        _check_count(option, size, most)
    given = [one for one in sizes if one is not None]
    if given and (name is not None or len(given) < len(sizes)):
        msg = "--layers, --kv-heads and --head-dim go together, without --model."
        raise UsageError(msg)
    if given:
        num_layers, num_kv_heads, size = given
        cache = CacheShape.uniform(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=size)
        text = f"{num_layers} layers x {num_kv_heads} KV heads x {size}"
        return PlannedModel(
            name=text, cache=cache, weight_bytes=None, longest_tokens=None, dtype=None
        )
    if name is not None:
        from tracekit.model.read_config import read_config

        read = read_config(name)
        return PlannedModel(
            name=f"{read.name} ({read.model_type}, {read.num_layers} layers)",
            cache=read.cache,
            weight_bytes=read.num_weight_bytes,
            longest_tokens=read.longest_tokens,
            dtype=read.dtype,
        )
    if results is None:
        msg = "nothing to plan for: give --model, or --layers, --kv-heads and --head-dim, or --results."
        raise UsageError(msg)
    return _recorded(results.spec)


def _recorded(spec: ModelSpec) -> PlannedModel:
    from tracekit.cli.plan_numbers import PlannedModel
    from tracekit.measure.memory import CacheShape

    return PlannedModel(
        name=f"{spec.name} ({spec.model_type}, {len(spec.layers)} layers), as recorded",
        cache=CacheShape.of(spec),
        weight_bytes=spec.num_weight_bytes,
        longest_tokens=spec.trained_positions or spec.max_positions,
        dtype=spec.dtype,
    )


def _context(text: str | None, model: PlannedModel) -> int:
    from tracekit.errors import UsageError

    if text is not None:
        return parse_tokens(text)
    if model.longest_tokens is None:
        msg = "the longest text of this model is not known: give --context, such as 64k."
        raise UsageError(msg)
    return model.longest_tokens


def _fractions(text: str) -> list[float]:
    from tracekit.errors import UsageError

    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(LEAST_KEPT <= one <= 1 for one in found):
        msg = (
            f"--kept is a fraction of at least {LEAST_KEPT:g} and at most 1, or several with commas, "
            f"unlike {text!r}."
        )
        raise UsageError(msg)
    return found
