"""Tiny random models of the families that attend in different ways, built without any file."""

from __future__ import annotations

from typing import Any

from tests import tiny

WINDOW = 8

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
    "falcon": ("falcon", {"num_key_value_heads": None, "multi_query": True, "alibi": False}),
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
