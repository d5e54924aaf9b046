"""Record a model on prompts: generate, watch, write, one sequence after the other."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.torch import save_file

from tracekit import schema
from tracekit.errors import InputError, ModelError
from tracekit.measure.head import Head
from tracekit.model.head import head_tensors
from tracekit.model.load import LoadedModel, load_model
from tracekit.model.tap import tap
from tracekit.model.versions import new_cache
from tracekit.model.vocabulary import vocabulary_table
from tracekit.progress import Progress, Silent
from tracekit.record.capture import Capture
from tracekit.record.generate import generate, stop_ids
from tracekit.record.manifest import make_manifest, notes
from tracekit.record.options import DEFAULT_NEW_TOKENS, STORE_DTYPES, RecordOptions
from tracekit.record.prompts import PromptFile, read_prompts
from tracekit.record.render import Rendered, render
from tracekit.record.steps import step_columns
from tracekit.record.tokens import Tokens
from tracekit.trace import layout
from tracekit.trace.writer import TraceWriter, disk_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.record.prompt import Prompt


@dataclass(frozen=True)
class Skipped:
    """A prompt that was not recorded, and why."""

    prompt: str
    why: str


@dataclass(frozen=True)
class Recorded:
    """What a recording left: its folder, how many sequences it holds, what was skipped."""

    path: Path
    num_sequences: int
    num_new: int
    skipped: tuple[Skipped, ...]


def record(
    model: str | LoadedModel,
    prompts: str | PromptFile,
    out: str | Path,
    options: RecordOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Recorded:
    """Record a model on prompts into a trace; the same call again goes on where it stopped.

    Parameters
    ----------
    model
        Built-in name, folder, GGUF file or hub id; or a model that is loaded.
    prompts
        Built-in name or file (see ``read_prompts``), or prompts that are read.
    out
        Folder of the trace: new, empty, or the same recording begun before.
    options
        What to record and how.
    progress
        Listener.

    Returns
    -------
    Recorded
        With the prompts that were skipped and why.

    Raises
    ------
    InputError
        Prompts, folder or disk are not as they must be.
    ModelError
        The model cannot give such a trace.
    """
    options, progress, out = options or RecordOptions(), progress or Silent(), Path(out)
    file = read_prompts(prompts) if isinstance(prompts, str) else prompts
    skipped = [Skipped(f"line {bad.line} of {file.name}", bad.why) for bad in file.bad]
    for one in skipped:
        progress.say(f"{one.prompt} is skipped: {one.why}")
    loaded = load_model(model) if isinstance(model, str) else model
    for note in notes(loaded, options):
        progress.say(note)
    wanted = file.prompts[: options.limit]
    with (
        disk_errors(out),
        TraceWriter(
            out, make_manifest(loaded, file, options), overwrite=options.overwrite
        ) as writer,
    ):
        recorder = _Recorder(loaded, writer, options)
        recorder.write_constants()
        if "constants" not in writer.manifest:
            recorder.note_constants()
        already = len(writer.finished)
        if already:
            progress.say(f"{out} holds {already} sequences already; going on.")
        progress.start("recording", len(wanted), "prompts")
        for prompt in wanted:
            if f"{prompt.id}#0" not in writer.finished:
                try:
                    recorder.sequence(prompt)
                except InputError as error:
                    skipped.append(Skipped(prompt.id, str(error)))
                    progress.say(f"prompt {prompt.id} is skipped: {error}")
            progress.advance()
        writer.update_manifest(skipped=[[one.prompt, one.why] for one in skipped])
        num_sequences = len(writer.finished)
    return Recorded(out, num_sequences, num_sequences - already, tuple(skipped))


class _Recorder:
    """One recording: the loaded model, the open trace and the settings."""

    def __init__(self, loaded: LoadedModel, writer: TraceWriter, options: RecordOptions) -> None:
        self._loaded = loaded
        self._writer = writer
        self._options = options
        self._tensors = head_tensors(loaded.model)
        self._head = Head(
            self._tensors["head.weight"], self._tensors.get("head.bias"), loaded.spec.head
        )

    def write_constants(self) -> None:
        """Write what all sequences share: the vocabulary, and the head if it is wanted."""
        path = self._writer.path
        if not (path / layout.VOCABULARY).exists():
            table = vocabulary_table(self._loaded.tokenizer, self._loaded.spec.head.num_rows)
            temporary = path / f".{layout.VOCABULARY}"
            pq.write_table(table, temporary, compression="zstd")
            layout.sync_file(temporary)
            temporary.replace(path / layout.VOCABULARY)
        if self._options.head == "store" and not (path / layout.WEIGHTS).exists():
            temporary = path / f".{layout.WEIGHTS}"
            tensors = {name: one.detach().cpu().contiguous() for name, one in self._tensors.items()}
            try:
                save_file(tensors, temporary)
            except SafetensorError as error:
                temporary.unlink(missing_ok=True)
                msg = f"cannot write {path / layout.WEIGHTS}: {error}."
                raise InputError(msg) from error
            temporary.chmod(0o644)  # safetensors makes files that nobody else can read
            layout.sync_file(temporary)
            temporary.replace(path / layout.WEIGHTS)

    def note_constants(self) -> None:
        """Write the checksums of what all sequences share into the manifest."""
        names = [layout.VOCABULARY] + [layout.WEIGHTS] * (self._options.head == "store")
        paths = [self._writer.path / name for name in names]
        self._writer.update_manifest(
            constants={
                path.name: {"bytes": path.stat().st_size, "sha256": layout.sha256(path)}
                for path in paths
            }
        )

    def sequence(self, prompt: Prompt) -> None:
        """Record one prompt with its answers as one sequence."""
        options, spec = self._options, self._loaded.spec
        parts = render(prompt, self._loaded.tokenizer)
        new = options.max_new_tokens or prompt.max_new_tokens or DEFAULT_NEW_TOKENS
        self._check_length(sum(len(part.ids) for part in parts) + new * len(parts))
        sequence_id = f"{prompt.id}#0"
        seed = sequence_seed(options.seed, sequence_id)
        capture = Capture(
            sequence_id,
            spec,
            self._writer.shard,
            with_attention=options.capture != "steps",
            with_tensors=options.capture == "qkv",
            dtype=STORE_DTYPES[options.dtype_store],
        )
        tokens = self._run(parts, capture, max_new_tokens=new, seed=seed)
        self._write(prompt, sequence_id, seed, parts, tokens, capture)

    def _run(
        self, parts: Sequence[Rendered], capture: Capture, *, max_new_tokens: int, seed: int
    ) -> Tokens:
        """Answer each part of the prompt in turn, over one cache, watched by ``capture``."""
        tokens, cache = Tokens(), new_cache(self._loaded.model)
        for number, part in enumerate(parts):
            tokens.add_prompt(part, stop_ids(self._loaded.model))
            with tap(self._loaded.model, capture):
                capture.begin_turn()
                new = generate(
                    self._loaded,
                    tokens.ids,
                    cache,
                    self._options.sampler,
                    max_new_tokens=max_new_tokens,
                    seed=seed + number,
                )
            tokens.add_answer(new, part)
        return tokens

    def _write(
        self,
        prompt: Prompt,
        sequence_id: str,
        seed: int,
        parts: Sequence[Rendered],
        tokens: Tokens,
        capture: Capture,
    ) -> None:
        shard, spec = self._writer.shard, self._loaded.spec
        capture.finish()
        if self._options.capture != "steps":
            capture.write_hidden()
        ids = tokens.ids
        if capture.num_rows != len(ids) - 1:
            msg = (
                f"{spec.name} ran {capture.num_rows} positions for {len(ids)} tokens, not one less: "
                "its passes cannot be told apart, so it cannot be recorded."
            )
            raise ModelError(msg)
        columns = {
            "sequence_id": sequence_id,
            "position": list(range(1, len(ids))),
            "temperature": 1.0,
            **step_columns(capture.hidden_TE, ids, self._head, num_tokens=spec.num_tokens),
            **capture.pass_columns(),
        }
        shard.append(schema.STEPS, len(ids) - 1, columns)
        shard.append(schema.TOKENS, len(ids), {"sequence_id": sequence_id, **tokens.columns()})
        answer = [token for token, made in zip(ids, tokens.is_generated, strict=True) if made]
        is_stopped = ids[-1] in stop_ids(self._loaded.model)
        self._writer.end_sequence(
            {
                "sequence_id": sequence_id,
                "prompt_id": prompt.id,
                "domain": prompt.domain,
                "sample": 0,
                "seed": seed,
                "num_tokens": len(ids),
                "context_end": parts[0].context_end,
                "prompt_end": len(parts[0].ids),
                "turn_ends": [tokens.turn_ends],
                "finish_reason": "eos" if is_stopped else "length",
                "text_source": "generated",
                "prompt_text": parts[0].text,
                "text": self._loaded.tokenizer.decode(
                    answer, skip_special_tokens=True, clean_up_tokenization_spaces=False
                ),
                "check": None if prompt.check is None else json.dumps(dict(prompt.check)),
                "sampler": json.dumps(self._options.sampler.to_json()),
            }
        )

    def _check_length(self, num_tokens: int) -> None:
        limit = self._loaded.spec.max_positions
        if limit is not None and num_tokens > limit:
            msg = (
                f"prompt and new tokens are {num_tokens} tokens, the model has {limit} positions; "
                "shorten it or lower --max-new-tokens."
            )
            raise InputError(msg)


def sequence_seed(seed: int, sequence_id: str) -> int:
    """Return the seed of one sequence: independent of what was recorded before it."""
    return uuid.uuid5(uuid.NAMESPACE_OID, f"{seed}/{sequence_id}").int % 2**62
