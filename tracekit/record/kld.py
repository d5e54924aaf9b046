"""Make a trace of a base file of llama.cpp's perplexity tool, without running the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import torch

from tracekit import schema
from tracekit.errors import InputError
from tracekit.measure.logits import step_statistics
from tracekit.model.load import LoadedModel, load_model
from tracekit.model.vocabulary import vocabulary_table
from tracekit.progress import Progress, Silent
from tracekit.record.kld_file import read_kld
from tracekit.record.manifest import make_manifest
from tracekit.record.steps import TOP_K
from tracekit.trace import layout
from tracekit.trace.writer import TraceWriter, disk_errors

if TYPE_CHECKING:
    from tracekit.record.kld_file import KldFile, KldRows


@dataclass(frozen=True)
class Imported:
    """What an import left.

    Parameters
    ----------
    path
        Folder or URL of the trace.
    num_sequences, num_new
        Sequences that it holds, and that this call added.
    num_missing
        Chunks that the file announces and the trace lacks, since they are not whole in the file.
    num_clamped, num_entries
        Log-probabilities of the file that stand at the clamp of their row, and all of them.
    """

    path: str
    num_sequences: int
    num_new: int
    num_missing: int
    num_clamped: int
    num_entries: int


def import_kld(
    path: str | Path,
    model: str | LoadedModel,
    out: str | Path,
    *,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Make a trace of capture level ``steps`` of a base file; the same call goes on with it.

    Each chunk of the text is a sequence ``chunk-0000#0``. The file has logits of the second half of
    a chunk only: with ``first = n_ctx // 2``, those of positions ``first`` to ``n_ctx - 2``, which
    predict the tokens at ``first + 1`` to ``n_ctx - 1``. These are the rows of ``steps``.

    Parameters
    ----------
    path
        File of ``llama-perplexity --kl-divergence-base``.
    model
        The model that wrote it, for its tokenizer and spec: what ``load_model`` takes, or a model
        that is loaded. It is not run.
    out
        Folder of the trace, or a URL of one: new, empty, or the same import begun before.
    overwrite
        Delete a trace that is there.
    trust_remote_code
        Whether Python code that comes with the model may run.
    progress
        Listener.

    Raises
    ------
    InputError
        If the file is none, is of another vocabulary, or folder or disk are not as they must be.
    ModelError
        If the model cannot be loaded.

    Notes
    -----
    Log-probabilities are within half a code of the model's own (1.2e-4 nats), but logits more than
    16 nats below the highest (24 in ik_llama.cpp), masked ones included, stand at that clamp, with
    up to V exp(-16) of mass too much: 0.6 % at V = 49 152. ``surprisal_nats`` and ``top_logprobs``
    are the file's own numbers, which give llama.cpp's "Mean PPL(base)"; the other statistics are of
    the distribution normalised. ``logsumexp`` is null, and ``free_energy`` and ``internal_energy``
    are where a row has clamped entries: their mean logit is not in the file.
    """
    progress, file = progress or Silent(), read_kld(Path(path))
    if isinstance(model, str):
        loaded = load_model(model, trust_remote_code=trust_remote_code, say=progress.say)
    else:
        loaded = model
    _check_vocabulary(file, loaded)
    writer = TraceWriter(out, make_manifest(loaded, _settings(file, loaded)), overwrite=overwrite)
    try:
        with disk_errors(out), writer:
            return _import(file, loaded, writer, progress)
    except BaseException:
        if writer.parting:
            progress.say(f"{writer.parting}.")
        raise


def _import(
    file: KldFile, loaded: LoadedModel, writer: TraceWriter, progress: Progress
) -> Imported:
    """Write the chunks that are not there yet, and count what stands at the clamp in all."""
    if not writer.has_file(layout.VOCABULARY):
        rows = vocabulary_table(loaded.tokenizer, loaded.spec.head.num_rows)
        writer.add_file(
            layout.VOCABULARY, lambda path: pq.write_table(rows, path, compression="zstd")
        )
    already, num_clamped = len(writer.finished), 0
    progress.start("importing", file.num_whole, "chunks")
    for chunk in range(file.num_whole):
        if _sequence_id(chunk) in writer.finished:
            num_clamped += file.num_clamped(chunk)
        else:
            num_clamped += _write_chunk(writer, file, chunk, loaded, progress)
        progress.advance()
    total = len(writer.finished)
    counts = {
        "num_missing": file.num_chunks - total,
        "num_clamped": num_clamped,
        "num_entries": file.num_whole * file.num_scored * file.num_vocab,
    }
    writer.update_manifest(imported=counts)
    return Imported(str(writer.path), total, total - already, **counts)


def _sequence_id(chunk: int) -> str:
    return f"chunk-{chunk:04d}#0"


def _check_vocabulary(file: KldFile, loaded: LoadedModel) -> None:
    """Refuse a model whose rows are not the file's."""
    spec = loaded.spec
    if file.num_vocab not in (spec.head.num_rows, spec.num_tokens):
        msg = (
            f"{file.path} has {file.num_vocab} logits a token, but {spec.name} has "
            f"{spec.head.num_rows} (its tokenizer {spec.num_tokens} tokens): give --model the model "
            "that wrote it."
        )
        raise InputError(msg)


def _write_chunk(
    writer: TraceWriter, file: KldFile, chunk: int, loaded: LoadedModel, progress: Progress
) -> int:
    """Write one chunk as a sequence; return its log-probabilities at the clamp."""
    sequence_id = _sequence_id(chunk)
    ids = file.tokens(chunk, loaded.tokenizer.bos_token_id)
    targets_T = torch.from_numpy(ids[file.first + 1 :].astype(np.int64))
    blocks, start, num_clamped = [], 0, 0
    for rows in file.rows(chunk):
        stop = start + len(rows.log_prob_TV)
        blocks.append(_statistics(rows, targets_T[start:stop], loaded.spec.num_tokens))
        num_clamped += int(rows.num_clamped_T.sum())
        start = stop
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    if lost := int(np.isnan(columns["entropy_nats"]).sum()):
        progress.say(
            f"{sequence_id}: {lost} of {start} rows are not finite and have no statistics."
        )
    columns["entropy_change"] = np.diff(columns["entropy_nats"], prepend=np.float32("nan"))
    columns["position"] = np.arange(file.first + 1, len(ids))
    whole = {"sequence_id": sequence_id, "is_scored": True, "path": "prefill", "temperature": 1.0}
    writer.shard.append(schema.STEPS, start, whole | columns)
    tokens = {"sequence_id": sequence_id, "position": np.arange(len(ids)), "token_id": ids}
    plain = {"turn": 0, "is_generated": False, "is_template": False}
    writer.shard.append(schema.TOKENS, len(ids), tokens | plain)
    # A trace of this level has the table; nobody saw the cache.
    writer.shard.append(schema.KV, 0, {})
    writer.end_sequence(_sequence_columns(chunk, ids, file, loaded))
    return num_clamped


def _statistics(rows: KldRows, targets_T: torch.Tensor, num_tokens: int) -> dict[str, np.ndarray]:
    """Return the statistics columns that these rows can give; what they cannot is NaN or left out."""
    columns = step_statistics(
        torch.from_numpy(rows.log_prob_TV), targets_T, num_tokens=num_tokens, top_k=TOP_K
    )
    # Not a property of the logits: ln of how much the codes' mass differs from 1.
    excess_T = columns.pop("logsumexp")
    columns["surprisal_nats"] -= excess_T
    columns["top_logprobs"] += excess_T[:, None]
    for name in ("free_energy", "internal_energy"):
        columns[name][rows.num_clamped_T > 0] = np.nan
    return columns


def _sequence_columns(
    chunk: int, ids: np.ndarray, file: KldFile, loaded: LoadedModel
) -> dict[str, Any]:
    trained = loaded.spec.trained_positions
    return {
        "sequence_id": _sequence_id(chunk),
        "prompt_id": _sequence_id(chunk).removesuffix("#0"),
        "domain": "text",
        "sample": 0,
        "num_tokens": len(ids),
        "finish_reason": "given",
        "text_source": "given",
        "text_start": chunk * len(ids),
        "scored_from": file.first + 1,
        "beyond_trained": trained is not None and len(ids) > trained,
        "prompt_text": loaded.tokenizer.decode(
            ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        ),
        "text": "",
    }


def _settings(file: KldFile, loaded: LoadedModel) -> dict[str, Any]:
    """Return what an import is made of; another goes on with it only if all of it agrees."""
    return {
        "capture": "steps",
        "head": "omit",
        "sampler": None,
        "kind": "kld",
        "source": file.path.name,
        "source_sha256": file.sha256,
        "n_ctx": int(file.token_CT.shape[1]),
        "n_vocab": file.num_vocab,
        "n_chunk": file.num_chunks,
        "begins_with_bos": file.begins_with(loaded.tokenizer.bos_token_id),
    }
