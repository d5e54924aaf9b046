"""What a recording would be, without recording: sequences, bytes by file, time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tracekit.kv.schedule import Spans
from tracekit.live.gradients import refuse_influence
from tracekit.record.estimate import Length, estimate_bytes
from tracekit.record.estimate_time import estimate_seconds
from tracekit.record.job import Job
from tracekit.record.options import RecordOptions, new_tokens

if TYPE_CHECKING:
    from tracekit.model.load import LoadedModel
    from tracekit.record.source import Source


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a recording would be.

    Parameters
    ----------
    num_sequences, num_skipped
        Sequences that would be recorded, and those that cannot be rendered.
    num_prompt, num_new
        Tokens to read, and at most to make, over all sequences.
    num_bytes
        By file name, over all shards.
    seconds
        Of the model alone, one sequence at a time.
    """

    num_sequences: int
    num_skipped: int
    num_prompt: int
    num_new: int
    num_bytes: dict[str, int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return asdict(self)


def estimate(loaded: LoadedModel, source: Source, options: RecordOptions) -> Estimate:
    """Return what ``record`` would leave and how long the model would need.

    Answers are taken as long as they may be.

    Raises
    ------
    ModelError
        If the model cannot give the influence probes, or the hidden states of layers, that are
        asked for.
    """
    probes = options.probes if options.capture == "influence" else None
    if probes is not None:
        refuse_influence(loaded)
    jobs = list(source.jobs(loaded.tokenizer))
    lengths = [_length(job, options) for job in jobs if isinstance(job, Job)]
    num_bytes = estimate_bytes(
        loaded.spec,
        lengths,
        capture=options.capture,
        dtype_store=options.dtype_store,
        head=options.head,
        store_oproj=options.store_oproj,
        maps=options.wanted(loaded.spec).maps,
        attention_topk=options.attention_topk,
        residual_layers=options.residual_layers(loaded.spec),
        probes=probes,
    )
    return Estimate(
        num_sequences=len(lengths),
        num_skipped=len(jobs) - len(lengths),
        num_prompt=sum(one.num_prompt for one in lengths),
        num_new=sum(one.num_new for one in lengths),
        num_bytes=num_bytes,
        seconds=estimate_seconds(loaded, lengths, num_probes=probes.number if probes else 0),
    )


def _length(job: Job, options: RecordOptions) -> Length:
    given = sum(len(part.ids) for part in job.parts)
    one = Length(given, new_tokens(job, options) * len(job.parts))
    if options.capture != "influence":
        return one
    first = job.parts[0]
    spans = Spans(
        num_tokens=one.num_rows + 1,
        context_end=first.context_end,
        prompt_end=job.prompt_end,
        turn_ends=tuple(first.turn_ends),
    )
    first_row = options.probes.first_row(spans)
    return one if first_row is None else replace(one, num_probed=one.num_rows - first_row)
