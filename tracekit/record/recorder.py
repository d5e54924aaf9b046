"""Record a model on what a source gives: run, watch, write, one batch after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import save_file

from tracekit.errors import InputError
from tracekit.live.gradients import refuse_influence
from tracekit.measure.head import Head
from tracekit.model.head import head_tensors
from tracekit.model.load import LoadedModel, load_model
from tracekit.model.oproj import output_projections
from tracekit.model.vocabulary import vocabulary_table
from tracekit.progress import Progress, Silent
from tracekit.record.batches import batches
from tracekit.record.job import Job, Skipped
from tracekit.record.manifest import make_manifest, notes, recording_settings
from tracekit.record.oproj import projection_tensors, without_projection
from tracekit.record.options import STORE_DTYPES, RecordOptions
from tracekit.record.outbox import Outbox
from tracekit.record.prompts import PromptFile, read_prompts
from tracekit.record.rendering import Rendering
from tracekit.record.session import Session
from tracekit.record.source import Source
from tracekit.record.sources.prompts import PromptSource
from tracekit.record.store import Store
from tracekit.record.transfer import Transfer
from tracekit.trace import layout
from tracekit.trace.writer import TraceWriter, disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

__all__ = ["Recorded", "Skipped", "record"]


@dataclass(frozen=True)
class Recorded:
    """What a recording left: its folder, how many sequences it holds, what was left out.

    ``skipped`` has prompts and sequences, and sequences that are there without their probes.
    """

    path: str
    num_sequences: int
    num_new: int
    skipped: tuple[Skipped, ...]


def record(
    model: str | LoadedModel,
    source: str | PromptFile | Source,
    out: str | Path,
    options: RecordOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Recorded:
    """Record a model on a source into a trace; the same call again goes on where it stopped.

    Parameters
    ----------
    model
        Built-in name, folder, GGUF file or hub id; or a model that is loaded.
    source
        Built-in name or file of prompts (see ``read_prompts``), prompts that are read, or a source:
        ``PromptSource``, ``TextSource``, ``ConversationSource``.
    out
        Folder of the trace, or a URL of one: new, empty, or the same recording begun before.
    options
        What to record and how.
    progress
        Listener.

    Returns
    -------
    Recorded
        With what was skipped and why.

    Raises
    ------
    InputError
        Source, folder or disk are not as they must be.
    ModelError
        The model cannot give such a trace.
    """
    options, progress = options or RecordOptions(), progress or Silent()
    source = _as_source(source)
    loaded = load_model(model) if isinstance(model, str) else model
    if options.capture == "influence":
        refuse_influence(loaded)
    for note in notes(loaded, options):
        progress.say(note)
    manifest = make_manifest(loaded, recording_settings(loaded, source, options))
    writer = TraceWriter(out, manifest, overwrite=options.overwrite)
    try:
        with disk_errors(out), writer, Outbox() as outbox:
            return _Recording(loaded, source, options, progress, writer, outbox).run()
    except BaseException:
        if writer.parting:
            progress.say(f"{writer.parting}.")
        raise


def _as_source(source: str | PromptFile | Source) -> Source:
    if isinstance(source, Source):
        return source
    file = read_prompts(source) if isinstance(source, str) else source
    return PromptSource(file, Rendering())


class _Recording:
    """One run of the recorder over an open trace."""

    def __init__(
        self,
        loaded: LoadedModel,
        source: Source,
        options: RecordOptions,
        progress: Progress,
        writer: TraceWriter,
        outbox: Outbox,
    ) -> None:
        self._loaded = loaded
        self._source = source
        self._options = options
        self._progress = progress
        self._writer = writer
        self._outbox = outbox
        self._tensors = head_tensors(loaded.model)
        self._finished = frozenset(writer.finished)
        self._skipped: list[Skipped] = []

    def run(self) -> Recorded:
        """Record what is not there yet."""
        self._add_constants()
        for bad in self._source.bad:
            self._skip(Skipped(f"line {bad.line} of {self._source.name}", bad.why))
        if self._finished:
            self._progress.say(
                f"{self._writer.path} holds {len(self._finished)} sequences already; going on."
            )
        count = self._source.count(self._loaded.tokenizer)
        self._progress.start("recording", count, "sequences")
        session = Session(self._loaded, self._options, self._store(), self._progress)
        for batch in batches(self._jobs(session), self._options.batch_size):
            for skipped in session.run(batch):
                self._skip(skipped)
            self._progress.advance(len(batch))
        self._outbox.flush()
        self._writer.update_manifest(skipped=[[one.prompt, one.why] for one in self._skipped])
        total = len(self._writer.finished)
        path = str(self._writer.path)
        left_out = (*self._skipped, *session.unprobed)
        return Recorded(path, total, total - len(self._finished), left_out)

    def _jobs(self, session: Session) -> Iterator[Job]:
        """Yield what is to be run; what cannot be is skipped, what is there is passed over."""
        for job in self._source.jobs(self._loaded.tokenizer):
            if isinstance(job, Job) and job.sequence_id not in self._finished:
                try:
                    session.accept(job)
                except InputError as error:
                    self._skip(Skipped(job.prompt_id, str(error)))
                else:
                    yield job
                    continue
            elif isinstance(job, Skipped):
                self._skip(job)
            self._progress.advance()

    def _skip(self, skipped: Skipped) -> None:
        self._skipped.append(skipped)
        self._progress.say(f"{skipped.prompt} is skipped: {skipped.why}")

    def _store(self) -> Store:
        spec, options = self._loaded.spec, self._options
        head = Head(self._tensors["head.weight"], self._tensors.get("head.bias"), spec.head)
        return Store(
            writer=self._writer,
            outbox=self._outbox,
            transfer=Transfer(),
            head=head,
            num_tokens=spec.num_tokens,
            with_attention=options.capture != "steps",
            with_tensors=layout.holds(options.capture, "qkv"),
            wanted=options.wanted(spec),
            residual_layers=options.residual_layers(spec),
            dtype=STORE_DTYPES[options.dtype_store],
        )

    def _add_constants(self) -> None:
        """Write what all sequences share: the vocabulary, and the weights that are wanted."""
        if not self._writer.has_file(layout.VOCABULARY):
            rows = self._loaded.spec.head.num_rows
            table = vocabulary_table(self._loaded.tokenizer, rows)
            self._writer.add_file(
                layout.VOCABULARY, lambda path: pq.write_table(table, path, compression="zstd")
            )
        if not self._writer.has_file(layout.WEIGHTS) and (tensors := self._weights()):
            self._writer.add_file(layout.WEIGHTS, lambda path: _save(tensors, path))

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that are stored, on the CPU; say which cannot be."""
        tensors = dict(self._tensors) if self._options.head == "store" else {}
        if self._options.store_oproj:
            projections = output_projections(self._loaded.model, self._loaded.spec)
            if note := without_projection(self._loaded.spec, projections):
                self._progress.say(note)
            tensors |= projection_tensors(projections)
        return {name: one.detach().cpu().contiguous() for name, one in tensors.items()}


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file that others may read; it has errors of its own for a full disk."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        msg = f"cannot write {path.name}: {error}; free some space and repeat the command."
        raise InputError(msg) from error
    path.chmod(0o644)
