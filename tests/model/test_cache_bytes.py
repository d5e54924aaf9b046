from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from tests import architectures
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.versions import cache_keyword, new_cache

# 4 layers, 20 tokens, float32: bytes of the whole cache, entries by layer.
TRUTH = {
    "llama": (10_240, [20, 20, 20, 20]),
    "llama one kv head": (5_120, [20, 20, 20, 20]),
    "qwen3": (20_480, [20, 20, 20, 20]),
    "gpt2": (20_480, [20, 20, 20, 20]),
    "gpt_neox": (20_480, [20, 20, 20, 20]),
    "opt": (20_480, [20, 20, 20, 20]),
    "falcon": (5_120, [20, 20, 20, 20]),
    "mistral": (3_584, [7, 7, 7, 7]),
    "gemma2": (6_912, [7, 20, 7, 20]),
    "gemma3n": (3_456, [7, 20, 0, 0]),
    "gpt_oss": (6_912, [7, 20, 7, 20]),
    "deepseek_v3": (6_400, [20, 20, 20, 20]),
    "mixtral": (10_240, [20, 20, 20, 20]),
    "smollm3": (10_240, [20, 20, 20, 20]),
    "jamba": (5_120, [0, 20, 0, 20]),
    "qwen3_next": (5_120, [0, 20, 0, 20]),
    "mamba": (0, [0, 0, 0, 0]),
}
if architectures.BEFORE_5_16:
    TRUTH["deepseek_v3"] = (4 * 20 * 4 * (12 + 8) * 4, [20, 20, 20, 20])


@pytest.mark.parametrize("family", TRUTH)
def test_bytes_and_entries_are_those_of_the_tensors(family: str) -> None:
    model = architectures.model(family)
    cache = new_cache(model)
    with torch.no_grad():
        model(torch.arange(5, 25)[None], use_cache=True, **{cache_keyword(model): cache})
    layers = cache_layers(cache)
    # Recurrent states are no keys and values; they are counted by a test of their own.
    kv_bytes = sum(one.logical_bytes for one in layers if one.entries)
    entries = [one.entries for one in layers]
    # Old caches have no layer at all where keys are shared.
    assert (kv_bytes, entries + [0] * (4 - len(entries))) == TRUTH[family]
    assert all(one.resident_bytes >= one.logical_bytes for one in layers)


def test_a_sliding_layer_keeps_the_whole_prompt_resident() -> None:
    model = architectures.model("mistral")
    cache = new_cache(model)
    with torch.no_grad():
        model(torch.arange(5, 25)[None], **{cache_keyword(model): cache})
    assert cache_layers(cache)[0].resident_bytes == 2 * 2 * 20 * 8 * 4


def test_an_empty_cache_holds_nothing() -> None:
    model = architectures.model("llama")
    assert sum(one.resident_bytes for one in cache_layers(new_cache(model))) == 0


def test_recurrent_states_are_counted_and_hold_no_entries() -> None:
    model = architectures.model("mamba")
    cache = new_cache(model)
    with torch.no_grad():
        model(torch.arange(5, 25)[None], **{cache_keyword(model): cache})
    layers = cache_layers(cache)
    assert [one.entries for one in layers] == [0, 0, 0, 0]
    assert all(one.logical_bytes > 0 for one in layers)


def test_a_static_cache_counts_its_room() -> None:
    model = architectures.model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(torch.arange(5, 25)[None], **{cache_keyword(model): cache})
    assert sum(one.logical_bytes for one in cache_layers(cache)) == 2 * 4 * 2 * 32 * 8 * 4
    assert cache_layers(cache)[0].entries == 32


def test_storage_that_layers_share_is_counted_once() -> None:
    model = architectures.model("llama")
    cache = new_cache(model)
    with torch.no_grad():
        model(torch.arange(5, 25)[None], **{cache_keyword(model): cache})
    cache.layers[1].keys = cache.layers[0].keys
    first, second = cache_layers(cache)[:2]
    assert second.logical_bytes == first.logical_bytes
    assert second.resident_bytes == first.resident_bytes // 2
