"""What kvpress takes and gives for each cell of a grid; runs in kvpress's own environment.

A cell is one press at one kept fraction: the prompt is read under the press, then the recorded
tokens that follow it in one forward pass over the compressed cache, at their positions in the text.
Reads a job as JSON from standard input, writes one JSON object to standard output: of each cell its
name and kept fraction, the seconds of both passes, the mean surprisal (nats) of the recorded tokens
but the first, and the prompt's keys that are kept: bits by layer, KV head and position, in
hexadecimal. Loading the model is not counted.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
import transformers
from press import make_press
from transformers import AutoModelForCausalLM, DynamicCache


def mask_of_layer(module, args, kwargs):
    """Give each layer the causal mask of its own cache: PyramidKV leaves them unlike in length."""
    num_rows = kwargs["hidden_states"].shape[1]
    num_held = kwargs["past_key_values"].get_seq_length(module.layer_idx)
    hidden = torch.full((num_rows, num_held + num_rows), torch.finfo(torch.float32).min)
    kwargs["attention_mask"] = hidden.triu(num_held + 1)[None, None]
    return args, kwargs


def run_cell(model, press, prompt: torch.Tensor, rest: torch.Tensor) -> tuple:
    """Return the seconds of the prompt and of the tokens after it, their logits, and the cache."""
    cache, length = DynamicCache(config=model.config), prompt.shape[1]
    start = time.perf_counter()
    # As its own pipeline does, without the head.
    with press(model):
        model.model(prompt, past_key_values=cache)
    middle = time.perf_counter()
    position = torch.arange(length, length + rest.shape[1])[None]
    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [one.register_forward_pre_hook(mask_of_layer, with_kwargs=True) for one in modules]
    try:
        logits = model(rest, past_key_values=cache, position_ids=position).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return middle - start, time.perf_counter() - middle, logits, cache


def surprisal(logits: torch.Tensor, rest: torch.Tensor) -> float:
    """Return the mean surprisal of the tokens that the rows of the recorded ones predict, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), rest[0, 1:]))


def prompt_keys(model, prompt: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys [G, T, D] of each layer, without a press."""
    cache = DynamicCache(config=model.config)
    model.model(prompt, past_key_values=cache)
    return [layer.keys[0] for layer in cache.layers]


def kept_keys(model, cache: DynamicCache, prompt_keys: list[torch.Tensor]) -> str:
    """Return the keys of the prompt that a cache still holds, as bits; keys are known by their bits."""
    kept = []
    for module, layer, before in zip(model.model.layers, cache.layers, prompt_keys, strict=True):
        pairs = zip(_as_bytes(before), _as_bytes(layer.keys[0]), strict=True)
        is_kept = np.stack([np.isin(*pair) for pair in pairs])
        # AdaKV deletes nothing: it tells the attention which keys are not to be seen.
        masked = getattr(module.self_attn, "masked_key_indices", None)
        if masked is not None:
            is_kept[masked[1].numpy(), masked[2].numpy()] = False
        kept.append(is_kept)
    return np.packbits(np.concatenate(kept)).tobytes().hex()


def _as_bytes(keys: torch.Tensor) -> np.ndarray:
    """Return each key [G, T] as one value."""
    array = np.ascontiguousarray(keys.numpy())
    return array.view(f"V{array.shape[-1] * array.itemsize}")[..., 0]


def main() -> None:
    """Run all cells of the job with the model loaded once."""
    job = json.load(sys.stdin)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    prompt, rest = torch.tensor([job["prompt"]]), torch.tensor([job["rest"]])
    cells, failed, full_keys = [], [], {}
    with torch.no_grad():
        # The first pass of a process pays for what is set up once.
        model.model(prompt[:, :32])
        for name, wanted, fraction in job["cells"]:
            attention = wanted["attention"]
            model.set_attn_implementation(attention)
            if attention not in full_keys:
                full_keys[attention] = prompt_keys(model, prompt)
            try:
                press = make_press(wanted, fraction)
                *times, logits, cache = run_cell(model, press, prompt, rest)
            except (RuntimeError, ValueError) as error:
                failed.append(f"{name} kept={fraction}: {type(error).__name__}: {error}")
            else:
                kept = kept_keys(model, cache, full_keys[attention])
                cells.append((name, fraction, *times, surprisal(logits, rest), kept))
    print(
        json.dumps(
            {
                "cells": cells,
                "failed": failed,
                "threads": torch.get_num_threads(),
                "versions": {
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
            }
        )
    )


if __name__ == "__main__":
    main()
