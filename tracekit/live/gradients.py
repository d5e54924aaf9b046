"""Gradients of a model's own draws at every layer's attention output, one layer's graph at a time.

At every row t of the later rows a token y_t is drawn from the model's own next-token distribution
(temperature 1, raw logits). With the loss sum_t -log p(y_t), the gradient of layer l is

    g_l,t = d loss / d o_l,t,

o the attention output before the output projection. It flows through all layers above and through
the keys and values of the later rows; keys and values of earlier rows are constants, because
nothing that happens later changes them. To first order, errors e_l,t of attention move the loss by
sum_l,t <g_l,t, e_l,t>, whose variance over draws is twice the KL divergence that they cause: the
Fisher information, from labels of the model's own distribution (Kunstner et al. 2019, "Limitations
of the empirical Fisher approximation for natural gradient descent", section 2).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import grad

from tracekit.errors import ModelError
from tracekit.live.graded_attention import GradedAttention
from tracekit.live.run import decode
from tracekit.measure.attention import as_wide
from tracekit.model.bypass import bypasses
from tracekit.model.decoder import decoder_of, layer_number
from tracekit.model.resume import LayerCall, layer_calls, left_with
from tracekit.model.steer import steered
from tracekit.model.versions import muted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tracekit.live.run import FullRun
    from tracekit.model.load import LoadedModel

LOGIT_BYTES = 64 << 20
"""Probabilities, in float64, of the rows whose logits are taken at once."""

SAME_GATES = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1, "float16": 1e-1}
"""Largest difference of a layer's output by itself and in the model, relative in the L2 norm."""


def influence(
    run: FullRun, first_row: int, *, num_probes: int, seed: int, layers: Collection[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the gradients of probes at the attention outputs of layers, the top layer first.

    Each layer is run anew by itself, with its graph, and pulled back through once a probe: there is
    never a graph over two layers. Parameters have no gradients.

    Parameters
    ----------
    run
        The sequence under the full cache, T rows.
    first_row
        Position of the first of the R later rows, below T.
    num_probes
        P draws for every row.
    seed
        Of the draws: probe p draws the same tokens however many probes there are.
    layers
        Those that are wanted; the others above the lowest of them are passed through.

    Yields
    ------
    tuple of int and Tensor
        Layer number and gradients [P, H, R, D'], in nats a unit of the attention output, float32
        (float64 of a model in float64).

    Raises
    ------
    ModelError
        If the model's layers share keys, attend by themselves, or hand each other more than hidden
        states.
    """
    refuse_influence(run.loaded)
    if not layers:
        return
    calls = layer_calls(run.loaded.model, lambda: _decode_later(run, first_row))
    top = len(calls) - 1
    uniform_PR = _uniform(num_probes, run.num_rows - first_row, seed)
    output = _Graph(run, first_row, top, calls[top]).output.detach()
    pulled_P = _of_draws(run, first_row, output, uniform_PR)
    for layer in range(top, min(layers) - 1, -1):
        graph = _Graph(run, first_row, layer, calls[layer])
        pulled_P, own_PHRD = graph.pull(pulled_P)
        if layer in layers:
            yield layer, own_PHRD


def refuse_influence(loaded: LoadedModel) -> None:
    """Raise if a model cannot give influence probes.

    Raises
    ------
    ModelError
        Naming the first layer without keys of its own, or with attention that cannot be replaced.
    """
    bypassing = {layer_number(one) for one in decoder_of(loaded.model).modules() if bypasses(one)}
    for layer in loaded.spec.layers:
        is_steered = layer.holds_keys and layer.refusal is None and layer.index not in bypassing
        if not is_steered:
            why = layer.refusal or (
                "it attends by itself, not through transformers' attention functions"
                if layer.holds_keys
                else f"it is {layer.kind}, without keys of its own"
            )
            msg = (
                f"layer {layer.index} of {loaded.spec.name} has no influence probes: {why}; record "
                "with --capture qkv."
            )
            raise ModelError(msg)


class _Graph:
    """One layer over the later rows, with the graph that its gradients flow through."""

    def __init__(self, run: FullRun, first_row: int, layer: int, call: LayerCall) -> None:
        attention = GradedAttention(run, first_row)
        self._entry = run.inputs[layer][..., first_row:, :].detach().requires_grad_()
        with _differentiating(run.loaded.model), steered(run.loaded.model, attention):
            self.output: torch.Tensor = call.output(self._entry)
        if layer + 1 < len(run.spec.layers):
            _require_same(run, layer, self.output, run.inputs[layer + 1][..., first_row:, :])
        self._shift_HRD = attention.shift_HRD

    def pull(self, gradients_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients [P, ...] at the layer's input and [P, H, R, D'] at its attention output.

        Parameters
        ----------
        gradients_P
            Those at the layer's output, one a probe.
        """
        inputs = (self._entry, self._shift_HRD)
        pairs = [
            grad(self.output, inputs, one.to(self.output), retain_graph=True) for one in gradients_P
        ]
        at_entry, at_attention = zip(*pairs, strict=True)
        return as_wide(torch.stack(at_entry)), as_wide(torch.stack(at_attention))


def _of_draws(
    run: FullRun, first_row: int, output: torch.Tensor, uniform_PR: torch.Tensor
) -> torch.Tensor:
    """Return the gradients [P, ...] of the probes' losses at the last layer's output.

    The model's own norm and head are run, in blocks of rows.
    """
    model, ids_1R = run.loaded.model, run.ids_1T[:, first_row:]
    size = max(1, LOGIT_BYTES // (8 * run.spec.head.num_rows))
    parts = []
    for start in range(0, ids_1R.shape[1], size):
        rows = slice(start, start + size)
        leaf = output[..., rows, :].detach().requires_grad_()
        with _differentiating(model), left_with(model, leaf):
            logits_RV = model(input_ids=ids_1R[:, rows], use_cache=False).logits[0]
        slopes_PRV = _slopes(logits_RV.detach(), uniform_PR[:, rows])
        one = [
            grad(logits_RV, leaf, slope.to(logits_RV), retain_graph=True)[0] for slope in slopes_PRV
        ]
        parts.append(as_wide(torch.stack(one)))
    return torch.cat(parts, dim=-2)


def _slopes(logits_RV: torch.Tensor, uniform_PR: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield, a probe, the gradient [R, V] of its loss at the logits: p minus one at what is drawn."""
    prob_RV = logits_RV.double().softmax(dim=-1)
    mass_RV = prob_RV.cumsum(dim=-1)
    for uniform_R in uniform_PR.to(prob_RV.device):
        # The first token whose cumulated mass is above the draw; rounding leaves the sum below one.
        drawn_R1 = torch.searchsorted(mass_RV, uniform_R[:, None] * mass_RV[:, -1:], right=True)
        drawn_R1 = drawn_R1.clamp_max(prob_RV.shape[-1] - 1)
        yield prob_RV.scatter_add(1, drawn_R1, -torch.ones_like(drawn_R1, dtype=prob_RV.dtype))


def _uniform(num_probes: int, num_rows: int, seed: int) -> torch.Tensor:
    """Return numbers in [0, 1) [P, R]: a generator a probe, on the CPU, the same for all devices."""
    generators = [torch.Generator().manual_seed(seed + probe) for probe in range(num_probes)]
    rows = [torch.rand(num_rows, dtype=torch.float64, generator=one) for one in generators]
    return torch.stack(rows)


def _decode_later(run: FullRun, first_row: int) -> None:
    with torch.no_grad(), muted():
        decode(run.loaded, run.ids_1T[:, first_row:], first_row)


def _require_same(run: FullRun, layer: int, alone: Any, within: torch.Tensor) -> None:
    """Raise if a layer by itself gives something else than it gave in the model."""
    error = torch.inf
    if isinstance(alone, torch.Tensor) and alone.shape == within.shape:
        if not bool(alone.isfinite().all()):
            return  # it overflowed: its gradients are not finite either, which is for others to say
        within = within.to(alone.device)
        error = float((alone.detach() - within).double().norm() / within.double().norm())
    if not error <= SAME_GATES[run.spec.dtype]:
        msg = (
            f"layer {layer} of {run.spec.name} called by itself is off by {error:.1e} (relative): it "
            "is handed more than hidden states, so it has no influence probes; record with "
            "--capture qkv."
        )
        raise ModelError(msg)


@contextmanager
def _differentiating(model: Any) -> Iterator[None]:
    """Build graphs, but none that lead to parameters, until the block ends, however it ends."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    for one in parameters:
        one.requires_grad_(False)
    try:
        with torch.enable_grad(), muted():
            yield
    finally:
        for one in parameters:
            one.requires_grad_()
