"""What kvpress keeps of a random Llama's cache; runs in kvpress's own environment.

Reads a job as JSON from standard input, and writes one .npz a case: queries, keys and values of the
prompt as the attention saw them, and for each press its scores and the keys that it keeps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from kvpress.utils import get_prerope_query_states
from press import make_press
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

HEAD_DIM = 16
VOCABULARY = 8192


def random_model(case: dict, attention: str) -> LlamaForCausalLM:
    """Return a Llama whose weights are wide enough that attention is far from uniform."""
    torch.manual_seed(case["seed"])
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        initializer_range=0.15,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


class Watch:
    """Forward hook of the attention modules: asks each press, and leaves the cache as it is."""

    def __init__(self, job: dict) -> None:
        self._job = job
        self.arrays: dict[str, list[np.ndarray]] = {}

    def __call__(self, module, args, kwargs, output) -> None:
        """Take the rows of one layer, and what each press makes of them."""
        hidden, cache = kwargs["hidden_states"], kwargs["past_key_values"]
        layer = cache.layers[module.layer_idx]
        query = get_prerope_query_states(module, hidden)
        query, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        self._add("query", query)
        self._add("key", layer.keys)
        self._add("value", layer.values)
        for number, wanted in enumerate(self._job["presses"]):
            kept = []
            for fraction in self._job["fractions"]:
                score, mask = self._ask(wanted, fraction, (module, hidden, layer, output, kwargs))
                kept.append(mask)
                self._add(f"score{number}_{fraction}", score)
            self._add(f"kept{number}", torch.stack(kept)[None])

    def _ask(self, wanted: dict, fraction: float, call: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores that a press sorts by, and the mask of keys that it keeps."""
        module, hidden, layer, output, kwargs = call
        press = make_press(wanted, fraction)
        scorer, seen = getattr(press, "press", press), []
        score_of = scorer.score

        def remembering(*args, **named):
            score = score_of(*args, **named)
            seen.append(score.clone())  # AdaKV writes its safeguard into the tensor itself
            return score

        scorer.score = remembering
        module.masked_key_indices = None
        keys, values = layer.keys.clone(), layer.values.clone()
        left, _ = press.compress(module, hidden, keys, values, output[1], kwargs)
        mask = (left[:, :, :, None] == layer.keys[:, :, None]).all(-1).any(2)
        if module.masked_key_indices is not None:
            mask[module.masked_key_indices] = False
        return seen[0], mask[0]

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.arrays.setdefault(name, []).append(tensor[0].numpy().copy())


def run(case: dict, job: dict, path: Path) -> None:
    """Prefill one prompt and write what was seen, layers first."""
    model, watch = random_model(case, job["attention"]), Watch(job)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        layer.self_attn.register_forward_hook(watch, with_kwargs=True)
    # No token twice: in layer 0 its keys would have equal norms.
    ids = torch.randperm(VOCABULARY)[None, : case["tokens"]]
    model(ids, past_key_values=DynamicCache(config=model.config))
    arrays = {name: np.stack(layers) for name, layers in watch.arrays.items()}
    np.savez(path, inv_freq=model.model.rotary_emb.inv_freq.numpy(), **arrays)


def main() -> None:
    """Run all cases of the job."""
    job = json.load(sys.stdin)
    with torch.no_grad():
        for number, case in enumerate(job["cases"]):
            run(case, job, Path(job["folder"]) / f"{number}.npz")


if __name__ == "__main__":
    main()
