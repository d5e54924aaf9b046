from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import architectures, tiny
from tests.architectures import WINDOW
from tests.model.test_tap import Watch, ids
from tracekit.errors import ModelError, UsageError
from tracekit.measure.rope import layout_of, rotate, undo
from tracekit.model import read_spec as read_spec_module
from tracekit.model.read_rope import LAYOUTS, SHIFT, read_ropes, rope_of
from tracekit.model.read_spec import CHECK_GATES, check_attention, read_spec
from tracekit.model.tap import tap
from tracekit.spec import UNREAD_ROPE, LayerSpec, ModelSpec, RopeLayout


def spec_of(family: str, **config: Any) -> ModelSpec:
    return read_spec(architectures.model(family, **config), name=family, num_tokens=265)


def plain(kind: str = "full", **changes: Any) -> dict[str, Any]:
    """Return what most tiny models have: 4 heads, 2 KV heads of 8."""
    window = WINDOW if kind == "sliding" else None
    truth = {"kind": kind, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
    return {**truth, "window": window, "scale": 8**-0.5, "rope": "default", **changes}


LINEAR = {"kind": "linear", "num_heads": 0, "num_kv_heads": 0, "rope": None}
SLOPES = (0.25, 0.0625, 0.015625, 0.00390625)

TRUTH: dict[str, list[dict[str, Any]]] = {
    "llama": [plain()] * 4,
    "llama one kv head": [plain(num_kv_heads=1)] * 4,
    "qwen3": [plain(head_dim=16, value_dim=16, scale=0.25)] * 4,
    "gpt2": [plain(num_kv_heads=4, rope=None)] * 4,
    "gpt_neox": [plain(num_kv_heads=4)] * 4,
    "mistral": [plain("sliding")] * 4,
    "gemma2": [
        plain("sliding", softcap=2.0, scale=0.25),
        plain(softcap=2.0, scale=0.25),
    ]
    * 2,
    "gemma3": [
        plain("sliding", scale=0.0625, rope="sliding_attention"),
        plain(scale=0.0625, rope="full_attention"),
    ]
    * 2,
    "gemma3n": [
        plain("sliding", scale=1.0, rope="sliding_attention"),
        plain(scale=1.0, rope="full_attention"),
        plain("shared", scale=1.0, rope="sliding_attention", window=WINDOW, owner=0),
        plain("shared", scale=1.0, rope="full_attention", owner=1),
    ],
    "gpt_oss": [plain("sliding"), plain()] * 2,
    "mixtral": [plain()] * 4,
    "smollm3": [plain(), plain(rope=None)] * 2,
    "cohere2": [plain("sliding"), plain(rope=None)] * 2,
    "granite": [plain(scale=0.2)] * 4,
    "qwen3_next": [LINEAR, plain()] * 2,
    "jamba": [LINEAR, plain(rope=None)] * 2,
    "opt": [plain(num_kv_heads=4, rope=None, scale=1.0)] * 4,
    "falcon": [plain(num_kv_heads=1)] * 4,
    "falcon new": [plain(num_kv_heads=4)] * 4,
    "bloom": [plain(num_kv_heads=4, rope=None)] * 4,
    "mpt": [plain(num_kv_heads=4, rope=None)] * 4,
    "gpt_neo": [
        plain(num_kv_heads=4, rope=None, scale=1.0),
        plain("sliding", num_kv_heads=4, rope=None, scale=1.0),
    ]
    * 2,
    "mamba": [LINEAR] * 4,
}


@pytest.mark.parametrize("family", TRUTH)
def test_layers_are_read_as_they_are(family: str) -> None:
    for layer, truth in zip(spec_of(family).layers, TRUTH[family], strict=True):
        assert {name: getattr(layer, name) for name in truth} == pytest.approx(truth)
        assert layer.refusal is None


# Bytes after 20 tokens in float32; a window of 8 holds 8 entries while a token is read.
KV_BYTES = {
    "llama": 10_240,
    "llama one kv head": 5_120,
    "qwen3": 20_480,
    "gpt2": 20_480,
    "mistral": 3_584 * 8 // 7,
    "gemma2": 2 * 128 * (8 + 20),
    "gemma3n": 128 * (8 + 20),
    "mixtral": 10_240,
    "smollm3": 10_240,
    "mamba": 0,
}


@pytest.mark.parametrize("family", KV_BYTES)
def test_kv_bytes_follow_from_the_spec(family: str) -> None:
    assert spec_of(family).kv_bytes(20, bytes_per_number=4) == KV_BYTES[family]


DEEPSEEK = [] if architectures.BEFORE_5_16 else [("deepseek_v3", "compressed", 4)]


@pytest.mark.parametrize(
    ("family", "words", "num_refused"),
    [
        ("llama4", "chunked", 3),
        ("falcon alibi", "no straight lines", 4),
        *DEEPSEEK,
    ],
)
def test_attention_that_cannot_be_replayed_is_refused_by_layer(
    family: str, words: str, num_refused: int
) -> None:
    refusals = [layer.refusal for layer in spec_of(family).layers if layer.refusal is not None]
    assert len(refusals) == num_refused
    assert all(words in refusal for refusal in refusals)


def test_a_layer_with_a_changed_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = architectures.model("gpt_oss")
    whole = read_spec(model, name="x", num_tokens=265).layers
    assert all(layer.sinks is not None and len(layer.sinks) == 4 for layer in whole)
    # The sdpa kernel does not know sinks: what it computes is another function.
    for module in model.modules():
        if hasattr(module, "config"):
            monkeypatch.setattr(module.config, "_attn_implementation_internal", "sdpa")
    refusals = [layer.refusal for layer in read_spec(model, name="x", num_tokens=265).layers]
    assert all(refusal is not None and "off by" in refusal for refusal in refusals)


def test_a_soft_cap_is_read_where_it_is_used_and_refused_where_the_kernel_ignores_it() -> None:
    model = architectures.model("gemma2")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    spec = read_spec(model, name="x", num_tokens=265)
    # Old releases run Gemma 2 in sdpa, which has no soft-cap.
    is_ignored = spec.attention == "sdpa"
    assert all((layer.refusal is not None) == is_ignored for layer in spec.layers)


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ModelError, match="no causal model"):
        spec_of("bert")


def test_logits_that_do_not_follow_from_hidden_states_are_refused() -> None:
    model = architectures.model("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output**3)
    with pytest.raises(ModelError, match="logits recomputed"):
        read_spec(model, name="x", num_tokens=265)


@pytest.mark.parametrize(
    ("family", "scale", "softcap", "is_tied"),
    [
        ("llama", 1.0, None, False),
        ("llama tied", 1.0, None, True),
        ("cohere", 0.25, None, True),
        ("granite", 0.25, None, False),
        ("gemma2", 1.0, 3.0, True),
    ],
)
def test_the_head_is_read(family: str, scale: float, softcap: float | None, is_tied: bool) -> None:
    head = spec_of(family).head
    assert (head.num_rows, head.hidden_size) == (272, 32)
    assert (head.scale, head.softcap, head.is_tied) == (scale, softcap, is_tied)


def test_ropes_are_those_of_the_modules() -> None:
    model = architectures.model("gpt_oss")
    rope = read_ropes(model)["default"]
    rotary = model.model.rotary_emb
    assert rope.kind == "yarn"
    assert rope.attention_scaling == pytest.approx(rotary.attention_scaling)
    assert rope.inv_freq == pytest.approx(rotary.inv_freq.tolist())
    assert {name: rope.theta for name, rope in spec_of("gemma3").ropes.items()} == {
        "sliding_attention": 10_000.0,
        "full_attention": 1_000_000.0,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rope_is_recognised_by_what_it_does_to_keys(layout: RopeLayout) -> None:
    ropes = spec_of("gemma3").ropes
    torch.manual_seed(0)
    key = torch.randn(2, 5, 8, dtype=torch.float64)
    for name, rope in ropes.items():
        angle = SHIFT * torch.tensor(rope.inv_freq, dtype=torch.float64)
        split = (4, 2) if layout == "neighbours" else (2, 4)
        left, right = key.unflatten(-1, split).unbind(-1 if layout == "neighbours" else -2)
        turned = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()
        moved = torch.stack(turned, -1 if layout == "neighbours" else -2).flatten(-2)
        assert rope_of(key, moved, ropes, gate=1e-9) == (name, layout)
    assert rope_of(key, key, ropes, gate=1e-9) is None
    assert rope_of(key, key + 1, ropes, gate=1e-9) is None


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "halves"),
        ("gpt_oss", "halves"),
        ("falcon", "halves"),
        ("cohere", "neighbours"),
        ("cohere2", "neighbours"),
        ("llama4", "neighbours"),
        ("gpt_neox", "halves"),  # one pair: both are the same
    ],
)
def test_the_layout_of_a_rope_is_seen(family: str, layout: str) -> None:
    assert [rope.layout for rope in spec_of(family).ropes.values()] == [layout]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_layout_of_a_rope_is_seen_in_half_precision(dtype: torch.dtype) -> None:
    for family, layout in (("llama", "halves"), ("cohere", "neighbours")):
        model = architectures.model(family).to(dtype)
        spec = read_spec(model, name=family, num_tokens=265)
        assert spec.ropes["default"].layout == layout


def test_recorded_keys_turn_back_into_those_before_the_rope() -> None:
    for family in ("llama", "cohere", "gpt_neox", "gpt_oss"):
        model, near, far = architectures.model(family), Watch(), Watch()
        rope = read_spec(model, name=family, num_tokens=265).ropes["default"]
        position_K = torch.arange(9)
        with torch.no_grad():
            for watch, shift in ((near, 0), (far, 100)):
                with tap(model, watch):
                    model(ids(9), position_ids=position_K[None] + shift)
        for here, there in zip(near.calls, far.calls, strict=True):
            before = undo(here.key_BGKD, position_K, rope)
            after = undo(there.key_BGKD, position_K + 100, rope)
            torch.testing.assert_close(before, after, rtol=0, atol=1e-4)
            torch.testing.assert_close(
                rotate(here.key_BGKD, 100, rope), there.key_BGKD, rtol=0, atol=1e-4
            )


def test_a_rope_whose_layers_do_not_agree_has_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = itertools.cycle([("default", "halves"), ("default", "neighbours")])
    monkeypatch.setattr(read_spec_module, "rope_of", lambda *args, **options: next(answers))
    assert spec_of("llama").ropes["default"].layout is None


def test_longrope_ends_where_its_frequencies_change() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    spec = spec_of("llama", rope_parameters=rope)
    assert (spec.max_positions, spec.trained_positions) == (64, None)


@pytest.mark.parametrize(
    ("family", "hard", "soft"),
    [
        ("llama", None, 512),
        ("gemma3", None, 512),
        ("gpt_oss", None, 512),
        ("gpt2", 512, None),
        ("opt", 512, None),
        ("gpt_neo", 512, None),
        ("mpt", 512, None),
        ("bloom", None, 512),
        ("mamba", None, 512),
        ("jamba", None, 512),
    ],
)
def test_positions_end_where_they_are_learned_and_go_on_where_they_turn(
    family: str, hard: int | None, soft: int | None
) -> None:
    spec = spec_of(family)
    assert (spec.max_positions, spec.trained_positions, spec.num_embeddings) == (hard, soft, 272)


def test_a_model_runs_up_to_its_hard_limit_and_no_farther() -> None:
    for family in ("gpt2", "opt", "gpt_neo", "mpt"):
        model = architectures.model(family)
        longest = read_spec(model, name=family, num_tokens=265).max_positions
        assert longest is not None
        model(ids(longest))
        with pytest.raises((IndexError, RuntimeError)):
            model(ids(longest + 1))


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_slopes_are_found_and_are_the_same_in_all_layers(family: str) -> None:
    for layer in spec_of(family).layers:
        assert layer.alibi == pytest.approx(SLOPES, rel=1e-6)
    assert all(layer.alibi is None for layer in spec_of("gpt_neo").layers)


def test_biases_that_are_rounded_are_refused_though_short_texts_do_not_show_it() -> None:
    spec = read_spec(architectures.model("bloom").bfloat16(), name="x", num_tokens=265)
    assert all("rounded" in (layer.refusal or "") for layer in spec.layers)
    spec = read_spec(architectures.model("mpt").bfloat16(), name="x", num_tokens=265)
    assert all(layer.refusal is None for layer in spec.layers)


def test_a_model_that_runs_without_a_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="without a cache"):
        read_spec(tiny.model("openai-gpt"), name="x", num_tokens=265)


def test_specs_of_older_traces_are_read_and_their_one_limit_is_told_apart() -> None:
    for family, hard, soft in (("llama", None, 512), ("gpt2", 512, None)):
        data = spec_of(family).to_json()
        for name in ("trained_positions", "num_embeddings"):
            del data[name]
        for layer in data["layers"]:
            del layer["alibi"]
        for rope in data["ropes"].values():
            del rope["layout"]
        old = ModelSpec.from_json({**data, "max_positions": 512})
        assert (old.max_positions, old.trained_positions, old.num_embeddings) == (hard, soft, 272)
        assert old.layers == spec_of(family).layers
        assert all(rope.layout is None for rope in old.ropes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_self_check_passes_in_every_dtype(dtype: torch.dtype) -> None:
    spec = read_spec(architectures.model("llama").to(dtype), name="x", num_tokens=265)
    assert spec.dtype == str(dtype).removeprefix("torch.")
    assert all(layer.refusal is None for layer in spec.layers)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_check_reads_the_visible_set_of_a_padded_batch(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    spec = read_spec(model, name=family, num_tokens=265)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad(), tap(model, watch):
        model(ids(12, batch=2), attention_mask=mask)
    for call, layer in zip(watch.calls, spec.layers, strict=True):
        assert call.mask is not None
        if family == "gemma2":
            # Eager kernels average over all keys in rows that see none: compare the other rows.
            assert check_attention(rows_from(call, 5), layer) < CHECK_GATES["float32"]
        else:
            assert check_attention(call, layer) < CHECK_GATES["float32"]


def rows_from(call: Any, first: int) -> Any:
    return replace(
        call,
        query_BHQD=call.query_BHQD[:, :, first:],
        mask=call.mask[:, :, first:],
        output_BQHD=call.output_BQHD[:, first:],
    )


@pytest.mark.parametrize("change", [{"scale": 0.5}, {"softcap": 0.1}, {"window": 3}])
def test_the_check_finds_a_wrong_spec(change: dict[str, Any]) -> None:
    model, watch = architectures.model("llama"), Watch()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer = read_spec(model, name="x", num_tokens=265).layers[0]
    with torch.no_grad(), tap(model, watch):
        model(ids(12))
    assert check_attention(watch.calls[0], layer) < 1e-6
    assert check_attention(watch.calls[0], replace(layer, **change)) > 1e-3


def test_a_spec_survives_json() -> None:
    for family in ("gpt_oss", "mpt"):
        spec = spec_of(family)
        assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_fingerprint_is_repeatable_and_moves_with_any_number_or_setting() -> None:
    first = spec_of("llama").fingerprint
    assert spec_of("llama").fingerprint == first
    assert spec_of("llama", rms_norm_eps=1e-3).fingerprint != first
    assert read_spec(tiny.model(seed=1), name="x", num_tokens=265).fingerprint != first
    model = tiny.model()
    with torch.no_grad():
        # A number between the sampled ones.
        model.model.embed_tokens.weight.view(-1)[4001] += 1e-3
    changed = read_spec(model, name="x", num_tokens=265)
    assert changed.fingerprint != first
    assert isinstance(changed.layers[0], LayerSpec)


def test_a_fingerprint_does_not_depend_on_name_threads_or_attention() -> None:
    model = tiny.model()
    first = read_spec(model, name="a", num_tokens=265)
    model.set_attn_implementation("eager")
    model.config._name_or_path = "elsewhere"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = read_spec(model, name="b", num_tokens=265)
    finally:
        torch.set_num_threads(threads)
    assert (first.fingerprint, second.attention) == (second.fingerprint, "eager")


@pytest.mark.parametrize("kind", ["gptj", "codegen"])
def test_a_rotary_embedding_that_no_module_explains_is_named_so(kind):
    """Keys turn, what the model says does not: a rule that needs the embedding must refuse."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 128}
    config = AutoConfig.for_model(kind, vocab_size=64, bos_token_id=1, eos_token_id=1, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    spec = read_spec(model, name="x", num_tokens=64)
    assert {layer.rope for layer in spec.layers} == {UNREAD_ROPE}
    with pytest.raises(UsageError, match="could not be read"):
        layout_of(spec.ropes[UNREAD_ROPE])


def test_learned_positions_are_no_rotary_embedding():
    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=64, bos_token_id=1, eos_token_id=1
    )
    spec = read_spec(AutoModelForCausalLM.from_config(config).eval(), name="x", num_tokens=64)
    assert {layer.rope for layer in spec.layers} == {None}
    assert not spec.ropes
