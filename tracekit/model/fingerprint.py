"""One short text that stands for a model: replay refuses a model with another one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from accelerate.utils import align_module_device

SAMPLED_NUMBERS = 4096
"""Numbers of each parameter that enter the fingerprint one by one."""

_BOOKKEEPING = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
        "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "label2id", "name_or_path",
        "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
        "quantization_config", "return_dict", "sep_token_id", "torch_dtype", "transformers_version",
        "use_cache",
    }
)  # fmt: skip
"""Entries of a config that do not change what the model computes."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: Any) -> str:
    """Return the SHA-256 over a model's type, config and parameters.

    Of each parameter, in the order of names, go in: its name, dtype and shape, at most
    ``SAMPLED_NUMBERS`` numbers at even strides, and the sum of all its bits read as integers. The
    sum is exact, hence the same on every device and for any number of threads, which a sum of
    floating-point numbers is not.

    It detects another architecture, setting or dtype, and the change of any single number of any
    parameter. It does not detect changes that leave both the samples and the sum as they were (two
    numbers exchanged between the sampled places), nor other code under the same ``model_type``.

    Parameters
    ----------
    model
        A loaded model; parameters that are left on disk are read from there.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    settings = _without_bookkeeping(model.config.to_diff_dict())
    head = {"model_type": model.config.model_type, "config": settings}
    digest.update(json.dumps(head, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name in sorted(name for name, _ in model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            with align_module_device(module):
                _add(digest, name, getattr(module, leaf))
    return digest.hexdigest()


def _add(digest: Any, name: str, parameter: torch.Tensor) -> None:
    digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
    bits = parameter.detach().reshape(-1).view(_INTEGERS[parameter.element_size()])
    stride = max(1, -(-bits.numel() // SAMPLED_NUMBERS))
    digest.update(bits[::stride].cpu().numpy().tobytes())
    digest.update(str(int(bits.sum(dtype=torch.int64))).encode())


def _without_bookkeeping(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that change the function, in configs within the config too."""
    return {
        name: _without_bookkeeping(value) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name not in _BOOKKEEPING
    }
