"""A tiny Llama as a GGUF file, so that conversion is tested without the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2


def write(path: Path, *, left_out: str = "") -> None:
    """Write the file; weights whose name begins with ``left_out`` are missing."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    _add_tokenizer(writer)
    random = np.random.default_rng(0)
    for name, shape in _shapes().items():
        if not left_out or not name.startswith(left_out):
            values = random.normal(0, 0.1, shape).astype(np.float32)
            writer.add_tensor(name, np.ones_like(values) if len(shape) == 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    vocabulary = tiny.tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in tiny.SPECIALS else normal for token in tokens])
    writer.add_token_merges(["t h", "th e", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _shapes() -> dict[str, tuple[int, ...]]:
    num_tokens = len(tiny.tokenizer())
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (num_tokens, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (num_tokens, HIDDEN),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv_size, HIDDEN),
            "attn_v": (kv_size, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes
