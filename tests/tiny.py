"""A tokenizer and models so small that tests build them in milliseconds, without any file."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tokenizer() -> Any:
    """Return a byte-level tokenizer: 3 special tokens, 256 bytes, a few merges; chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("o", "n")]
    pieces = SPECIALS + alphabet + ["".join(pair) for pair in merges]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


SETTINGS: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What tiny models have unless they are asked for something else."""


def model(model_type: str = "llama", *, seed: int = 0, **config: Any) -> Any:
    """Return a random float32 model of 4 layers, 4 heads, hidden size 32, in evaluation mode."""
    return build(AutoModelForCausalLM, model_type, {**SETTINGS, **config}, seed=seed)


def build(kind: Any, model_type: str, config: dict[str, Any], *, seed: int = 0) -> Any:
    """Return a random float32 model of a class of transformers, in evaluation mode."""
    torch.manual_seed(seed)
    return kind.from_config(AutoConfig.for_model(model_type, **config)).float().eval()
