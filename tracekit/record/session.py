"""Run batches of jobs through the model, watched, and enter what they gave."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tracekit import schema
from tracekit.errors import InputError, ModelError
from tracekit.model.tap import tap
from tracekit.model.versions import new_cache
from tracekit.record.capture import Capture
from tracekit.record.ends import Wish
from tracekit.record.generate import generate, stop_ids
from tracekit.record.job import Job, Skipped
from tracekit.record.lane import NEVER, Lane
from tracekit.record.options import RecordOptions, new_tokens
from tracekit.record.probes import Probes
from tracekit.record.render import rerendered_ids
from tracekit.record.seed import sequence_seed
from tracekit.record.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.model.load import LoadedModel
    from tracekit.progress import Progress
    from tracekit.record.store import Store


class Session:
    """A loaded model that runs batches for one recording.

    Parameters
    ----------
    loaded
        Model and tokenizer.
    options
        What to record and how.
    store
        Where it goes.
    progress
        Listener.
    """

    def __init__(
        self, loaded: LoadedModel, options: RecordOptions, store: Store, progress: Progress
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._store = store
        self._progress = progress
        self._stop_ids = stop_ids(loaded.model)
        self._has_warned = False
        self._probes: Probes | None = None
        if options.capture == "influence":
            self._probes = Probes(loaded, options.probes, store, progress)

    @property
    def unprobed(self) -> tuple[Skipped, ...]:
        """Sequences that are recorded, but without the probes that were asked for."""
        return () if self._probes is None else tuple(self._probes.left_out)

    def accept(self, job: Job) -> None:
        """Look at a job before it is run.

        Raises
        ------
        InputError
            If the model cannot run it: too long, ids that it has no embedding for, nothing to
            predict.
        """
        spec = self._loaded.spec
        given = sum(len(part.ids) for part in job.parts)
        new = self._new_tokens(job)
        longest = given + new * len(job.parts)
        if spec.max_positions is not None and longest > spec.max_positions:
            advice = "cut it with --window" if job.is_given else "lower --max-new-tokens"
            msg = (
                f"prompt and new tokens are {longest} tokens, the model has {spec.max_positions} "
                f"positions; shorten it or {advice}."
            )
            raise InputError(msg)
        if new == 0 and given < 2:
            msg = "it is one token, so there is none to predict."
            raise InputError(msg)
        highest = max(max(part.ids) for part in job.parts)
        if spec.num_embeddings is not None and highest >= spec.num_embeddings:
            msg = (
                f"the tokenizer gives id {highest}, the model has {spec.num_embeddings} embeddings; "
                "use the tokenizer that belongs to the model."
            )
            raise InputError(msg)
        if self._is_beyond(longest) and not self._has_warned:
            self._has_warned = True
            self._progress.say(
                f"{job.sequence_id} may reach {longest} tokens, the model was trained on "
                f"{spec.trained_positions}: what goes beyond is recorded, and flagged in sequences."
            )

    def run(self, batch: Sequence[Job]) -> Iterator[Skipped]:
        """Record a batch, and yield what had to be left out of it."""
        wishes = [self._first_wish(job) for job in batch]
        width = max(len(wish.ids) for wish in wishes)
        lanes = [
            Lane(
                sequence_id=job.sequence_id,
                number=number,
                pad=width - len(wish.ids),
                store=self._store,
                scored_from=job.scored_from,
            )
            for number, (job, wish) in enumerate(zip(batch, wishes, strict=True))
        ]
        capture = Capture(self._loaded.spec, lanes)
        texts = self._generate(batch, wishes, capture)
        capture.finish([tokens.ids for tokens in texts])
        for job, lane, tokens in zip(batch, lanes, texts, strict=True):
            if lane.first_bad is not None:
                yield Skipped(job.sequence_id, self._why_bad(*lane.first_bad))
            else:
                self._end(job, lane, tokens)

    def _first_wish(self, job: Job) -> Wish:
        ids, new = job.parts[0].ids, self._new_tokens(job)
        seed = sequence_seed(self._options.seed, job.sequence_id)
        if new == 0:
            # The last token is not run: what it predicts is nowhere. The one new token that
            # generation makes of the rest is thrown away.
            return Wish(ids=ids[:-1], max_new_tokens=1, seed=seed)
        return Wish(ids=ids, max_new_tokens=new, seed=seed)

    def _generate(
        self, batch: Sequence[Job], wishes: Sequence[Wish], capture: Capture
    ) -> list[Tokens]:
        """Answer the first parts together, then the further parts of a job that runs alone."""
        cache = new_cache(self._loaded.model)
        texts = [Tokens() for _ in batch]
        for job, tokens in zip(batch, texts, strict=True):
            tokens.add_prompt(job.parts[0], self._stop_ids)
        answers = self._answers(wishes, cache, capture, self._options.prefill_chunk)
        for job, tokens, answer in zip(batch, texts, answers, strict=True):
            if self._new_tokens(job):
                tokens.add_answer(answer, job.parts[0])
        job, tokens = batch[0], texts[0]
        if not self._new_tokens(job):
            return texts
        for number, part in enumerate(job.parts[1:], start=1):
            tokens.add_prompt(part, self._stop_ids)
            seed = sequence_seed(self._options.seed, job.sequence_id) + number
            wish = Wish(ids=tokens.ids, max_new_tokens=self._new_tokens(job), seed=seed)
            tokens.add_answer(self._answers([wish], cache, capture, None)[0], part)
        return texts

    def _answers(
        self, wishes: Sequence[Wish], cache: Any, capture: Capture, prefill_chunk: int | None
    ) -> list[list[int]]:
        with tap(self._loaded.model, capture, capture.leaving):
            return generate(
                self._loaded,
                wishes,
                cache,
                self._options.sampler,
                prefill_chunk=prefill_chunk,
                watcher=capture,
            )

    def _end(self, job: Job, lane: Lane, tokens: Tokens) -> None:
        """Enter a sequence that is whole."""
        ids = tokens.ids
        if lane.num_rows != len(ids) - 1:
            name = self._loaded.spec.name
            msg = (
                f"{name} ran {lane.num_rows} positions for {len(ids)} tokens, not one less: its "
                "passes cannot be told apart, so it cannot be recorded."
            )
            raise ModelError(msg)
        columns = {"sequence_id": job.sequence_id, **tokens.columns()}
        row = self._row(job, tokens)
        if self._probes is not None:
            row |= self._probes.put(job, tokens)
        writer = self._store.writer
        self._store.outbox.put(
            lambda: writer.shard.append(schema.TOKENS, len(ids), columns), 64 * len(ids)
        )
        self._store.outbox.put(lambda: writer.end_sequence(row))

    def _row(self, job: Job, tokens: Tokens) -> dict[str, Any]:
        """Return the sequence's row of ``schema.SEQUENCES``."""
        ids, is_given = tokens.ids, self._new_tokens(job) == 0
        finish = "given" if is_given else "eos" if ids[-1] in self._stop_ids else "length"
        answers = tokens.answers()
        return {
            "sequence_id": job.sequence_id,
            "prompt_id": job.prompt_id,
            "domain": job.domain,
            "sample": job.sample,
            "seed": sequence_seed(self._options.seed, job.sequence_id),
            "num_tokens": len(ids),
            "context_end": job.parts[0].context_end,
            "prompt_end": job.prompt_end,
            "turn_ends": [tokens.turn_ends],
            "finish_reason": finish,
            "text_source": "given" if is_given else "generated",
            "text_start": job.text_start,
            "scored_from": job.scored_from,
            "beyond_trained": self._is_beyond(len(ids)),
            "rerender_agrees": self._agrees(job, ids, answers),
            "prompt_text": job.parts[0].text,
            "text": "\n\n".join(self._decode(answer) for answer in answers),
            "check": None if job.check is None else json.dumps(dict(job.check)),
            "sampler": json.dumps(self._options.sampler.to_json()),
        }

    def _agrees(self, job: Job, ids: list[int], answers: list[list[int]]) -> bool | None:
        """Return whether the template over the real answers gives the ids that were run."""
        if len(job.parts) == 1 or job.prompt is None or not answers:
            return None
        texts = [self._decode(answer) for answer in answers]
        wanted = rerendered_ids(job.prompt, texts, self._loaded.tokenizer, job.rendering)
        own = ids[:-1] if ids[-1] in self._stop_ids else ids
        return list(wanted[: len(own)]) == own

    def _decode(self, ids: list[int]) -> str:
        text: str = self._loaded.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _new_tokens(self, job: Job) -> int:
        return new_tokens(job, self._options)

    def _is_beyond(self, num_tokens: int) -> bool:
        trained = self._loaded.spec.trained_positions
        return trained is not None and num_tokens > trained

    def _why_bad(self, position: int, layer: int) -> str:
        where = "the final hidden states" if layer == NEVER else f"layer {layer}"
        dtype, stored = self._loaded.spec.dtype, self._options.dtype_store
        kept = "" if stored == "native" else f" and stored in {stored}"
        hint = (
            "; load the model as bfloat16 or float32."
            if dtype == "float16"
            else "; if the numbers are too large for it, store them natively or in bfloat16."
            if stored == "float16"
            else "."
        )
        return (
            f"{where} computed in {dtype}{kept} first held NaN or infinity at position "
            f"{position}{hint}"
        )
