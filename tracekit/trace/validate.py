"""Check a trace wholly: files, checksums, schemas, counts, physics, ids, decoded text, tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tracekit import schema
from tracekit.errors import TraceError, TracekitError
from tracekit.trace import layout
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd

    from tracekit.trace.folder import AnyPath, Folder

FREE_ENERGY_TOLERANCE = 1e-5
"""Largest |F - (U - T S)|, relative to the terms: the columns are float32."""


@dataclass(frozen=True)
class Problem:
    """Something wrong, and where."""

    where: str
    what: str


@dataclass(frozen=True)
class Validation:
    """What was checked and what is wrong."""

    num_shards: int
    num_sequences: int
    num_steps: int
    num_nonfinite: int
    problems: tuple[Problem, ...]


def validate(path: str | AnyPath) -> Validation:
    """Return what is wrong with a trace.

    Parameters
    ----------
    path
        Folder of the trace, or a URL of fsspec.

    Raises
    ------
    TraceError
        If it is no trace at all, so that nothing can be checked.
    """
    trace = Trace(path)
    problems = list(damaged_files(trace))
    num_sequences = num_steps = num_nonfinite = 0
    # A recording killed before its first sequence may lack the vocabulary; going on writes it.
    if not problems and len(trace.sequences):
        texts = trace.vocabulary()
        for _, sequence in trace.sequences.iterrows():
            num_sequences += 1
            problems += _sequence(trace, sequence, texts)
        entropy = trace.table("steps", columns=["sequence_id", "entropy_nats"])["entropy_nats"]
        num_steps, num_nonfinite = len(entropy), int(entropy.isna().sum())
    return Validation(len(trace.shards), num_sequences, num_steps, num_nonfinite, tuple(problems))


def damaged_files(trace: Trace) -> Iterator[Problem]:
    """Yield what is wrong with the files of a trace: missing, cut, changed, of another schema."""
    for name, known in trace.manifest.get("constants", {}).items():
        yield from _changed(trace.folder, trace.path / name, known)
    for shard in trace.shards:
        yield from _shard(trace.folder, shard)


def require_whole(trace: Trace) -> None:
    """Raise if any file of a trace is not as it was written.

    Raises
    ------
    TraceError
        Naming the first such file.
    """
    for problem in damaged_files(trace):
        msg = f"{problem.where} {problem.what}; restore it, or record the trace again."
        raise TraceError(msg)


def _changed(folder: Folder, path: AnyPath, known: dict[str, Any]) -> Iterator[Problem]:
    """Yield how a file differs from what was written."""
    with folder.explained(path):
        if not path.exists():
            yield Problem(str(path), "is missing")
        elif (size := path.stat().st_size) != known["bytes"]:
            yield Problem(str(path), f"has {size} bytes, {known['bytes']} were written")
        elif layout.sha256(path) != known["sha256"]:
            yield Problem(str(path), "has another SHA-256 than was written")


def _shard(folder: Folder, shard: AnyPath) -> Iterator[Problem]:
    """Yield what is wrong with the files of one shard."""
    listing = shard / layout.LISTING
    try:
        files = json.loads(folder.parquet(listing).schema_arrow.metadata[layout.FILES_KEY])
    except (TraceError, KeyError, TypeError, ValueError) as error:
        why = type(error.__cause__ or error).__name__
        yield Problem(str(listing), f"cannot be read ({why})")
        return
    schemas = {table.name: table.schema for table in schema.SHARD_TABLES}
    for name, known in files.items():
        path = shard / name
        changes = list(_changed(folder, path, known))
        yield from changes
        if not changes and not folder.parquet(path).schema_arrow.equals(schemas[path.stem]):
            yield Problem(str(path), "has another schema than this version writes")


def _sequence(trace: Trace, sequence: pd.Series[Any], vocabulary: pd.DataFrame) -> list[Problem]:
    """Return what is wrong with one sequence; each check says where it failed."""
    where = f"{trace.path}: sequence {sequence['sequence_id']}"
    checks: list[Callable[[], Iterator[str]]] = [
        lambda: _tokens(trace, sequence, vocabulary),
        lambda: _steps(trace, sequence),
        lambda: _cache(trace, sequence),
        lambda: _attention(trace, sequence),
        lambda: _tensors(trace, sequence),
        lambda: _residuals(trace, sequence),
        lambda: _influence(trace, sequence),
    ]
    found: list[Problem] = []
    for check in checks:
        try:
            # One by one: what was found before a check broke off is kept.
            found.extend(Problem(where, what) for what in check())
        except TracekitError as error:
            found.append(Problem(where, str(error)))
    return found


def _tokens(trace: Trace, sequence: pd.Series[Any], vocabulary: pd.DataFrame) -> Iterator[str]:
    tokens = trace.table("tokens", sequence_id=sequence["sequence_id"])
    count = int(sequence["num_tokens"])
    if list(tokens["position"]) != list(range(count)):
        yield f"tokens: positions are not 0 .. {count - 1}"
    ids = tokens["token_id"].to_numpy()
    if outside := int(((ids < 0) | (ids >= len(vocabulary))).sum()):
        yield f"tokens: {outside} ids are outside the vocabulary"
        return
    made = tokens[tokens["is_generated"]]
    answers = [_spelt(own["token_id"], vocabulary) for _, own in made.groupby("turn")]
    # Tokenizers of the sentencepiece family write a word's space before it, also before the first.
    wanted = str(sequence["text"]).replace("\n\n ", "\n\n").lstrip(" ")
    if "\n\n".join(answers).replace("\n\n ", "\n\n").lstrip(" ") != wanted:
        yield "tokens: the generated ids do not spell the recorded text"


def _spelt(ids: pd.Series[int], vocabulary: pd.DataFrame) -> str:
    """Return the text that token ids stand for, special ones left out."""
    rows = vocabulary.loc[ids]
    pieces = rows.loc[rows["class"] != "special", "piece"].dropna()
    return b"".join(pieces).decode("utf-8", errors="replace")


def _steps(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    steps = trace.table("steps", sequence_id=sequence["sequence_id"])
    count = int(sequence["num_tokens"])
    # A base file of another tool has the positions that it scored, no others.
    is_partial = trace.manifest["settings"].get("kind") == "kld"
    first = int(sequence["scored_from"]) if is_partial else 1
    if list(steps["position"]) != list(range(first, count)):
        yield f"steps: positions are not {first} .. {count - 1}"
    free, internal = steps["free_energy"], steps["internal_energy"]
    heat = steps["temperature"] * steps["entropy_nats"]
    gap = (free - (internal - heat)).abs()
    size = free.abs() + internal.abs() + heat.abs() + 1e-3
    if bad := int((gap > FREE_ENERGY_TOLERANCE * size).sum()):
        yield f"steps: {bad} rows break F = U - T S"
    limit = np.log(trace.spec.head.num_rows) * (1 + 1e-6)
    if bad := int(((steps["entropy_nats"] < 0) | (steps["entropy_nats"] > limit)).sum()):
        yield f"steps: {bad} entropies are outside [0, ln V]"
    if bad := int(((steps["rank"] < 0) | (steps["rank"] >= trace.spec.head.num_rows)).sum()):
        yield f"steps: {bad} ranks are outside the vocabulary"
    flagged = steps["nonfinite"] > 0
    if bad := int((steps["entropy_nats"].isna() & ~flagged).sum()):
        yield f"steps: {bad} rows have no entropy though their logits are finite"


def _cache(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    rows = trace.table("kv", sequence_id=sequence["sequence_id"])
    by_pass = rows.groupby("position")["logical_bytes"].sum()
    steps = trace.table("steps", sequence_id=sequence["sequence_id"])
    known = steps.set_index("position")["kv_bytes"].dropna()
    known = known[known > 0]
    if not by_pass.reindex(known.index).eq(known).all():
        yield "kv: the bytes of the layers do not add up to those of the steps"
    if (rows["resident_bytes"] < rows["logical_bytes"]).any():
        yield "kv: fewer bytes are resident than the entries have"


def _attention(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    if trace.capture == "steps" or not _seen(trace):
        return
    rows = trace.table("attention", sequence_id=sequence["sequence_id"])
    passed = int(sequence["num_tokens"]) - 1
    for layer, part in rows.groupby("layer"):
        heads = trace.spec.layers[int(str(layer))].num_heads
        if len(part) != heads * passed:
            yield f"attention: layer {layer} has {len(part)} rows, not {heads} x {passed}"
    masses = rows[["sink_mass", "window_mass", "top_mass"]]
    if bad := int(((masses < -1e-5) | (masses > 1 + 1e-4)).any(axis=1).sum()):
        yield f"attention: {bad} rows have a mass outside [0, 1]"
    if bad := int((rows["effective_keys"] > rows["query"] + 1.01).sum()):
        yield f"attention: {bad} rows have more effective keys than keys"


def _tensors(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    sequence_id = str(sequence["sequence_id"])
    passed = int(sequence["num_tokens"]) - 1
    if trace.capture == "steps":
        return
    hidden = trace.hidden(sequence_id)
    if hidden.data.shape != (passed, trace.spec.head.hidden_size):
        yield f"tensors: final hidden states have shape {hidden.data.shape}"
    if not hidden.is_finite:
        yield "tensors: final hidden states are not all finite"
    if not layout.holds(trace.capture, "qkv"):
        return
    for index in trace.stored_layers(sequence_id):
        layer = trace.spec.layers[index]
        for kind, block in trace.attention_inputs(sequence_id, index).items():
            heads = layer.num_heads if kind == "query" else layer.num_kv_heads
            if block.data.shape[:2] != (heads, passed):
                yield f"tensors: {kind} of layer {index} has shape {block.data.shape}"


def _residuals(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    wanted = (int(sequence["num_tokens"]) - 1, trace.spec.head.hidden_size)
    for layer in trace.residual_layers:
        block = trace.residual(str(sequence["sequence_id"]), layer)
        if block.data.shape != wanted:
            yield f"tensors: hidden states of layer {layer} have shape {block.data.shape}, not {wanted}"
        if not block.is_finite:
            yield f"tensors: hidden states of layer {layer} are not all finite"


def _influence(trace: Trace, sequence: pd.Series[Any]) -> Iterator[str]:
    probes = trace.manifest["settings"].get("probes") or {"layers": []}
    passed = int(sequence["num_tokens"]) - 1
    for index in probes["layers"]:
        found = trace.influence(str(sequence["sequence_id"]), index)
        if found is None:
            return
        first, block = found
        layer = trace.spec.layers[index]
        wanted = (probes["number"], layer.num_heads, passed - first, layer.value_dim)
        if block.data.shape != wanted:
            yield f"tensors: probes of layer {index} have shape {block.data.shape}, not {wanted}"
        if not block.is_finite:
            yield f"tensors: probes of layer {index} are not all finite"


def _seen(trace: Trace) -> bool:
    """Whether any layer's attention can be seen."""
    return any(one.num_heads and one.refusal is None for one in trace.spec.layers)
