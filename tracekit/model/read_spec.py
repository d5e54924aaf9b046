"""The spec of a model, read by watching a short forward pass instead of believing its config."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import ModelError
from tracekit.measure.attention import as_wide, logits_HQK, outputs_HQD, visible_QK, weights_HQK
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.fingerprint import fingerprint
from tracekit.model.fit import fit_bias, is_straight
from tracekit.model.head import read_head
from tracekit.model.norm import last_layer, read_norm
from tracekit.model.probe import BIAS_PROBE_TOKENS, check_causal, probe_ids, takes_positions, watch
from tracekit.model.read_positions import read_positions
from tracekit.model.read_rope import SHIFT, is_same, read_ropes, rope_of
from tracekit.spec import UNREAD_ROPE, LayerSpec, ModelSpec, RopeSpec

if TYPE_CHECKING:
    from tracekit.model.probe import Seen
    from tracekit.model.tap import AttentionCall
    from tracekit.spec import LayerKind, RopeLayout

CHECK_GATES = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-2}
"""Largest error of recomputed attention outputs, relative to the largest output."""

SAME_GATES = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Largest relative difference of two passes that compute the same in another way."""


def read_spec(model: Any, *, name: str, num_tokens: int, revision: str | None = None) -> ModelSpec:
    """Return what a replay must know about a model.

    Parameters
    ----------
    model
        A loaded causal language model, in evaluation mode.
    name, revision
        Under which it was asked for; commit or hash of its source.
    num_tokens
        Entries of its tokenizer.

    Returns
    -------
    ModelSpec
        Layers whose attention cannot be recomputed carry a ``refusal``.

    Raises
    ------
    ModelError
        If earlier tokens see later ones, or logits do not follow from hidden states.
    """
    config = model.config.get_text_config(decoder=True)
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in CHECK_GATES:
        msg = f"{name} computes in {dtype}; load it as float32, bfloat16 or float16."
        raise ModelError(msg)
    ids = probe_ids(config)
    seen = watch(model, ids, residuals=last_layer(model))
    norm = read_norm(model, seen)
    check_causal(model, ids, seen, gate=SAME_GATES[dtype])
    ropes = read_ropes(model)
    layers = _read_layers(seen, config.num_hidden_layers, gate=CHECK_GATES[dtype])
    if any(layer.alibi for layer in layers):
        # Slopes are seen best, and biases rounded to bfloat16 are seen at all, over distances.
        ids = probe_ids(config, at_least=BIAS_PROBE_TOKENS)
        seen = watch(model, ids)
        layers = _read_layers(seen, config.num_hidden_layers, gate=CHECK_GATES[dtype])
    longest, trained = read_positions(model, ropes)
    fits = longest is None or ids.shape[1] + SHIFT <= longest
    if seen.calls and fits and takes_positions(model):
        moved = watch(model, ids, shift=SHIFT)
        layers, ropes = _with_ropes(layers, seen, moved, ropes, gate=SAME_GATES[dtype])
    return ModelSpec(
        name=name,
        revision=revision,
        model_type=model.config.model_type,
        fingerprint=fingerprint(model),
        dtype=dtype,
        layers=tuple(layers),
        head=read_head(model, seen.end),
        ropes=ropes,
        num_tokens=num_tokens,
        max_positions=longest,
        attention=config._attn_implementation,
        trained_positions=trained,
        num_embeddings=len(model.get_input_embeddings().weight),
        norm=norm,
        num_parameters=model.num_parameters(),
        num_weight_bytes=sum(weight.nbytes for weight in model.parameters()),
    )


def check_attention(call: AttentionCall, layer: LayerSpec) -> float:
    """Return the error of attention recomputed from a call, against the kernel's own output.

    Parameters
    ----------
    call
        Queries, keys, values and output of one call. Without a mask, what a query sees follows
        from the layer; then the last keys must be the queries' own.
    layer
        Its scale, window, soft-cap, ALiBi slopes and sinks.

    Returns
    -------
    float
        Largest absolute difference over the largest absolute output; rows that see no key
        (padding) are left out. NaN if the kernel's output is.
    """
    num_queries, num_keys = call.query_BHQD.shape[2], call.key_BGKD.shape[2]
    causal_QK = visible_QK(
        layer,
        num_queries,
        num_keys,
        first_query=num_keys - num_queries,
        device=call.query_BHQD.device,
    )
    # Heads share the mask in most models; its axes of size 1 stretch over batch and heads.
    seen_BHQK = _masked(causal_QK[None, None], call.mask)
    scores = logits_HQK(call.query_BHQD, call.key_BGKD, layer).masked_fill(~seen_BHQK, -torch.inf)
    ours_BQHD = outputs_HQD(weights_HQK(scores, layer), call.value_BGKD).transpose(1, 2)
    kernel_BQHD = as_wide(call.output_BQHD)
    # Kernels may return anything, NaN too, in rows that see no key.
    is_blind_BQ11 = ~seen_BHQK.any(-1).any(1)[..., None, None]
    error = (ours_BQHD - kernel_BQHD).abs().masked_fill(is_blind_BQ11, 0)
    return float(error.max() / kernel_BQHD.abs().masked_fill(is_blind_BQ11, 0).max())


def _masked(causal_11QK: torch.Tensor, mask: Any | None) -> torch.Tensor:
    """Return what is visible under the layer's rule and the call's own mask."""
    if not torch.is_tensor(mask):
        return causal_11QK
    if mask.is_floating_point():
        # Hidden keys carry the smallest number of the type; a position bias fails the check.
        mask = mask > torch.finfo(mask.dtype).min / 2
    # A flash kernel's mask has no query axis: it tells which tokens are no padding.
    keys = mask[:, None, None, :] if mask.ndim == 2 else mask
    seen: torch.Tensor = causal_11QK & keys
    return seen


def _read_layers(seen: Seen, num_layers: int, *, gate: float) -> list[LayerSpec]:
    """Return the layers as their attention calls and the cache show them, refusals included."""
    cache = seen.end.cache
    stores = {} if cache is None else dict(enumerate(cache.layers))
    entries = {} if cache is None else {one.layer: one.entries for one in cache_layers(cache)}
    layers = []
    for index in range(num_layers):
        calls = seen.of(index)
        if not calls:
            kind: LayerKind = "untapped" if entries.get(index) else "linear"
            layers.append(LayerSpec(index=index, kind=kind))
            continue
        layer = _read_layer(calls[0], _owner(calls[0], seen.calls))
        refusal = _refusal(layer, calls, stores.get(index), gate=gate)
        layers.append(replace(layer, refusal=refusal))
    return layers


def _read_layer(call: AttentionCall, owner: int | None) -> LayerSpec:
    kind: LayerKind = (
        "shared" if owner is not None else "full" if call.window is None else "sliding"
    )
    scale, alibi = fit_bias(call)
    return LayerSpec(
        index=call.layer,
        kind=kind,
        num_heads=call.query_BHQD.shape[1],
        num_kv_heads=call.key_BGKD.shape[1],
        head_dim=call.key_BGKD.shape[3],
        value_dim=call.value_BGKD.shape[3],
        scale=scale,
        window=call.window,
        softcap=call.softcap,
        sinks=None if call.sinks_H is None else tuple(call.sinks_H.flatten().tolist()),
        alibi=alibi,
        owner=owner,
    )


def _owner(call: AttentionCall, calls: list[AttentionCall]) -> int | None:
    """Return the earlier layer whose very keys this call reads, None if they are its own."""
    for other in calls:
        if other.layer >= call.layer:
            break
        # Devices may use the same addresses.
        is_near = other.key_BGKD.device == call.key_BGKD.device
        if is_near and other.key_BGKD.data_ptr() == call.key_BGKD.data_ptr():
            return other.layer
    return None


def _refusal(
    layer: LayerSpec, calls: list[AttentionCall], store: Any, *, gate: float
) -> str | None:
    """Return why a layer's attention cannot be replayed, None if it can."""
    call = calls[0]
    if len(calls) > 1:
        return f"it calls its attention {len(calls)} times a pass"
    if call.extras:
        return f"its attention takes {' and '.join(call.extras)}, which a replay does not have"
    keys, values = getattr(store, "keys", None), getattr(store, "values", None)
    if layer.kind != "shared" and keys is not None and values is not None:
        numbers = keys.shape[1] * (keys.shape[-1] + values.shape[-1])
        if numbers != layer.numbers_per_token:
            return "its cache holds compressed keys and values (MLA), which evict all heads at once"
        window = getattr(store, "sliding_window", None)
        # A cache that keeps more than a layer's window is no harm: GPT-Neo's does.
        if window is not None and window != layer.window:
            return (
                f"its attention says window {layer.window}, its cache {window}: "
                "chunked attention is not replayed"
            )
    if not is_straight(call, layer):
        return (
            "its ALiBi biases are rounded, by the dtype or by the model's own code, so that they are "
            "no straight lines at far positions"
        )
    error = check_attention(replace(call, mask=None), layer)
    if not error <= gate:
        return (
            f"its recomputed attention is off by {error:.1e} (relative, at most {gate:.0e} allowed): "
            "something besides scale, window, soft-cap, ALiBi slopes and sinks enters it"
        )
    return None


def _with_ropes(
    layers: list[LayerSpec], seen: Seen, moved: Seen, ropes: dict[str, RopeSpec], *, gate: float
) -> tuple[list[LayerSpec], dict[str, RopeSpec]]:
    """Return layers with the rope that turned their keys between two probes, ropes with layouts."""
    named, unread = list(layers), dict[str, RopeSpec]()
    # Keys that turn while what the model says stays: rotary. Learned positions change both.
    is_relative = is_same(seen.end.hidden_BTE, moved.end.hidden_BTE, gate=gate)
    layouts: dict[str, set[RopeLayout]] = {name: set() for name in ropes}
    for at, layer in enumerate(layers):
        if not layer.num_heads:
            continue
        before, after = (as_wide(one.of(layer.index)[0].key_BGKD[0]) for one in (seen, moved))
        if found := rope_of(before, after, ropes, gate=gate):
            name, layout = found
            named[at] = replace(layer, rope=name)
            layouts[name].add(layout)
        elif is_relative and not is_same(before, after, gate=gate):
            named[at] = replace(layer, rope=UNREAD_ROPE)
            unread = {UNREAD_ROPE: RopeSpec(kind=UNREAD_ROPE, theta=0.0, inv_freq=())}
    # Layers that do not agree leave the layout unknown, which is refused where it matters.
    return named, unread | {
        name: replace(rope, layout=layouts[name].pop() if len(layouts[name]) == 1 else None)
        for name, rope in ropes.items()
    }
