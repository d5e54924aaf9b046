"""Tiny random models of the families that attend in different ways, built without any file."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers import AutoModelForImageTextToText

from tests import tiny

WINDOW = 8

BEFORE_5_16 = Version("5.16") > Version(transformers.__version__)
"""DeepSeek's cache holds keys and values as attention sees them, not compressed."""

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt2": ("gpt2", {"num_key_value_heads": None}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "head_dim": 8,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": WINDOW, "head_dim": 8, "sliding_window_pattern": 2},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "sliding_window": WINDOW,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 272,
            "intermediate_size": 48,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"sliding_window": WINDOW, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.25, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2}),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "head_dim": 8,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "opt": ("opt", {"num_key_value_heads": None, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", {"num_key_value_heads": None, "multi_query": True, "alibi": False}),
    "falcon new": (
        "falcon",
        {
            "num_key_value_heads": None,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "alibi": False,
        },
    ),
    "falcon alibi": ("falcon", {"num_key_value_heads": None, "multi_query": True, "alibi": True}),
    "bloom": ("bloom", {"num_key_value_heads": None, "n_layer": 4, "n_head": 4}),
    "mpt": (
        "mpt",
        {
            "num_key_value_heads": None,
            "max_position_embeddings": None,
            "d_model": 32,
            "n_layers": 4,
            "n_heads": 4,
            "max_seq_len": 512,
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_key_value_heads": None,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "mamba": ("mamba", {"state_size": 4}),
    "bert": ("bert", {"num_key_value_heads": None}),
}


def model(name: str, **config: Any) -> Any:
    """Return a random float32 model of the family named so (see ``SETTINGS``)."""
    model_type, settings = SETTINGS[name]
    merged = {"num_key_value_heads": 2, **settings, **config}
    return tiny.model(
        model_type, **{key: value for key, value in merged.items() if value is not None}
    )


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
    "intermediate_size": 48,
}
_QWEN_IDS = {
    "image_token_id": 270,
    "video_token_id": 271,
    "vision_start_token_id": 268,
    "vision_end_token_id": 269,
}

VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"model_type": "llama"},
        {"vision_config": {"model_type": "clip_vision_model", **_TOWER}, "image_token_index": 270},
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "head_dim": 8,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
        },
        {
            "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
            "mm_tokens_per_image": 4,
            "image_token_index": 270,
            "boi_token_index": 268,
            "eoi_token_index": 269,
        },
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        {"vision_config": _QWEN_TOWER, **_QWEN_IDS},
    ),
    "qwen3_vl": (
        {"rope_parameters": _MROPE, "head_dim": 8},
        {"vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0]}, **_QWEN_IDS},
    ),
}
"""Vision-language models by type: settings of the text model inside, and all others."""


def vision_model(name: str) -> Any:
    """Return a random vision-language model (see ``VISION``)."""
    text, others = VISION[name]
    config = {"text_config": {**tiny.SETTINGS, **text}, **others}
    return tiny.build(AutoModelForImageTextToText, name, config)
