"""Seconds that kvpress takes for each cell of a grid; runs in kvpress's own environment.

A cell is one press at one kept fraction: the prompt is read under the press, then the recorded
tokens that follow it in one forward pass over the compressed cache. Reads a job as JSON from
standard input, writes one JSON object to standard output. Loading the model is not counted.
"""

from __future__ import annotations

import json
import sys
import time

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


def time_cell(model, press, prompt: torch.Tensor, rest: torch.Tensor) -> tuple[float, float]:
    """Return the seconds that the prompt took and those of the tokens after it."""
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
        model(rest, past_key_values=cache, position_ids=position)
    finally:
        for hook in hooks:
            hook.remove()
    return middle - start, time.perf_counter() - middle


def main() -> None:
    """Run all cells of the job with the model loaded once."""
    job = json.load(sys.stdin)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    prompt, rest = torch.tensor([job["prompt"]]), torch.tensor([job["rest"]])
    cells, failed = [], []
    with torch.no_grad():
        # The first pass of a process pays for what is set up once.
        model.model(prompt[:, :32])
        for name, wanted, fraction in job["cells"]:
            model.set_attn_implementation(wanted["attention"])
            try:
                times = time_cell(model, make_press(wanted, fraction), prompt, rest)
            except (RuntimeError, ValueError) as error:
                failed.append(f"{name} kept={fraction}: {type(error).__name__}: {error}")
            else:
                cells.append((name, fraction, *times))
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
