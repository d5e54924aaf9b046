"""Influence probes of a sequence that was just recorded, written before the sequence is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import ModelError
from tracekit.kv.schedule import Spans
from tracekit.live.gradients import influence
from tracekit.live.run import full_run
from tracekit.record.job import Skipped
from tracekit.record.lane import BLOCK_BYTES
from tracekit.record.probe_options import PROBE_DTYPES
from tracekit.record.seed import sequence_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.load import LoadedModel
    from tracekit.progress import Progress
    from tracekit.record.job import Job
    from tracekit.record.probe_options import ProbeOptions
    from tracekit.record.store import Store
    from tracekit.record.tokens import Tokens


class Probes:
    """Records the probes of one sequence after the other.

    The model is run once more over each: nothing is taken from how its tokens came about.

    Parameters
    ----------
    loaded
        Model and tokenizer.
    options
        Which probes are recorded.
    store
        Where they go.
    progress
        Listener.

    Attributes
    ----------
    left_out
        Sequences without probes, and why.
    """

    def __init__(
        self, loaded: LoadedModel, options: ProbeOptions, store: Store, progress: Progress
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._store = store
        self._progress = progress
        self._layers = options.chosen(loaded.spec)
        self.left_out: list[Skipped] = []

    def put(self, job: Job, tokens: Tokens) -> dict[str, Any]:
        """Write a sequence's probes; return what its row of ``schema.SEQUENCES`` says of them.

        Raises
        ------
        ModelError
            If the device's memory does not hold one layer's graph.
        """
        spans = Spans(
            num_tokens=len(tokens.ids),
            context_end=job.parts[0].context_end,
            prompt_end=job.prompt_end,
            turn_ends=tuple(tokens.turn_ends),
        )
        first_row = self._options.first_row(spans)
        if first_row is None:
            return {}
        # Not the sampler's seed: draws must not hang together with the text.
        seed = sequence_seed(self._options.seed, f"{job.sequence_id} probes")
        bad_layer = self._put_layers(job.sequence_id, tokens.ids, first_row, seed)
        if bad_layer is None:
            return {"probed_from": first_row}
        why = (
            f"gradients at layer {bad_layer}, computed in {self._loaded.spec.dtype} and stored in "
            f"{self._options.dtype}, are not finite; use bfloat16 or float32."
        )
        self.left_out.append(Skipped(job.sequence_id, why))
        self._progress.say(f"{job.sequence_id} is recorded without influence probes: {why}")
        return {"unprobed": why}

    def _put_layers(
        self, sequence_id: str, ids: Sequence[int], first_row: int, seed: int
    ) -> int | None:
        """Write probes layer by layer; return a layer that is not finite, at which it stopped.

        What was written before is then nobody's: no row of ``schema.SEQUENCES`` tells of it.
        """
        number, dtype = self._options.number, PROBE_DTYPES[self._options.dtype]
        try:
            run = full_run(self._loaded, ids[:-1])
            for layer, gradient_PHRD in influence(
                run, first_row, num_probes=number, seed=seed, layers=self._layers
            ):
                stored_PHRD = gradient_PHRD.to(dtype)
                if not bool(stored_PHRD.isfinite().all()):
                    return layer
                self._put(sequence_id, layer, first_row, stored_PHRD)
        except torch.OutOfMemoryError as error:
            msg = (
                f"{self._loaded.model.device} has no memory for the gradients of {sequence_id}, "
                f"{len(ids) - 1 - first_row} rows; begin later with --probe-from, or record with "
                "--capture qkv."
            )
            raise ModelError(msg) from error
        return None

    def _put(self, sequence_id: str, layer: int, first_row: int, stored_PHRD: torch.Tensor) -> None:
        size = max(1, BLOCK_BYTES // stored_PHRD[:, :, 0].nbytes)
        for start in range(0, stored_PHRD.shape[2], size):
            self._put_block(
                sequence_id, layer, first_row + start, stored_PHRD[:, :, start : start + size]
            )

    def _put_block(
        self, sequence_id: str, layer: int, first: int, stored_PHRD: torch.Tensor
    ) -> None:
        arrival = self._store.transfer.fetch({"influence": stored_PHRD})

        def write() -> None:
            array, dtype = arrival.arrays()["influence"]
            self._store.writer.shard.append_probes(sequence_id, layer, first, array, dtype)

        self._store.outbox.put(write, arrival.num_bytes)
