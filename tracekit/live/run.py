"""One pass of a sequence under the full cache: what all cells of the sequence share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tracekit.errors import ModelError
from tracekit.kv.reference import Reference
from tracekit.model.decoder import decoder_of
from tracekit.model.resume import watched_layers
from tracekit.model.tap import tap
from tracekit.model.versions import muted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.load import LoadedModel
    from tracekit.model.tap import AttentionCall, ForwardEnd
    from tracekit.spec import ModelSpec


@dataclass(frozen=True, eq=False)
class FullRun:
    """A sequence of T rows as the model runs it, nothing evicted.

    Rows before an eviction point do not depend on what comes after it, so one pass gives the
    prompt of every cell.

    Parameters
    ----------
    loaded
        The model.
    ids_1T
        Token ids of the rows, on the model's device.
    references
        By layer: queries, keys and values of all rows.
    inputs
        By layer: hidden states that enter it, with rows on the second to last axis.
    hidden_TE
        Final hidden states.
    """

    loaded: LoadedModel
    ids_1T: torch.Tensor
    references: dict[int, Reference]
    inputs: dict[int, torch.Tensor]
    hidden_TE: torch.Tensor

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        return self.loaded.spec

    @property
    def num_rows(self) -> int:
        """T."""
        return self.ids_1T.shape[1]


def full_run(loaded: LoadedModel, ids: Sequence[int]) -> FullRun:
    """Run a model over the rows of a sequence.

    Parameters
    ----------
    loaded
        The model.
    ids
        Token ids of the rows: all of a sequence but its last, at least one.

    Raises
    ------
    ModelError
        If the model holds a state other than keys and values, takes no positions, or did not attend
        where its spec says so.
    """
    refuse(loaded)
    ids_1T = torch.tensor([list(ids)], device=loaded.model.device)
    watch = _Watch(loaded.spec)
    with (
        torch.no_grad(),
        muted(),
        tap(loaded.model, watch),
        watched_layers(loaded.model, watch.enter),
    ):
        hidden_1TE = decode(loaded, ids_1T, 0)
    return FullRun(loaded, ids_1T, watch.references, watch.inputs, hidden_1TE[0])


def decode(loaded: LoadedModel, ids_BQ: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return the decoder's final hidden states [B, Q, E] of rows at positions from ``first_row`` on.

    The model's own cache is not used: who attends knows the keys of earlier rows.
    """
    position_Q = torch.arange(first_row, first_row + ids_BQ.shape[1], device=ids_BQ.device)
    output = decoder_of(loaded.model)(
        input_ids=ids_BQ,
        position_ids=position_Q.expand(len(ids_BQ), -1),
        use_cache=False,
    )
    hidden_BQE: torch.Tensor = output[0]
    return hidden_BQE


def refuse(loaded: LoadedModel) -> None:
    """Raise ``ModelError`` if eviction cannot be run inside a model."""
    for layer in loaded.spec.layers:
        if not layer.refusal and layer.kind != "linear":
            continue
        why = layer.refusal or (
            f"layer {layer.index} of {loaded.spec.name} holds a state that is no cache entry"
        )
        msg = f"{why}: eviction cannot be run inside this model; use --level local."
        raise ModelError(msg)


class _Watch:
    """Observer of the one pass."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.references: dict[int, Reference] = {}
        self.inputs: dict[int, torch.Tensor] = {}

    def enter(self, layer: int, hidden: torch.Tensor) -> None:
        """Keep what enters a layer."""
        self.inputs[layer] = hidden

    def attention(self, call: AttentionCall) -> None:
        """Keep what a layer attends with."""
        layer = self._spec.layers[call.layer]
        self.references[call.layer] = Reference(
            query_LHTD=call.query_BHQD,
            key_LGTD=call.key_BGKD,
            value_LGTD=call.value_BGKD,
            layer=layer,
            rope=None if layer.rope is None else self._spec.ropes[layer.rope],
        )

    def forward(self, end: ForwardEnd) -> None:
        """See nothing: the head is not run."""
