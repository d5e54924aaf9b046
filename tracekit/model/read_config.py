"""What a planner must know of a model, from its config alone: built and run without any weight.

The model is built on torch's ``meta`` device, where tensors have shapes and no numbers, and reads a
few tokens there. Its cache then shows what each layer holds: windows, shared and compressed keys,
states; nothing is believed of the config's own names.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import urllib.request
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from huggingface_hub.constants import ENDPOINT
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tracekit.errors import InputError, ModelError
from tracekit.measure.memory import MOST_LAYERS, MOST_TOKENS, CachedLayer, CacheShape
from tracekit.model.builtin import BUILTIN_MODELS, find_builtin
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.convert import converted
from tracekit.model.probe import PROBE_TOKENS, watch
from tracekit.model.versions import quiet

if TYPE_CHECKING:
    from tracekit.model.probe import Seen

_LONGEST = 300
"""Letters of what a library says that a sentence repeats."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What may be a hub id: a name, or an owner and a name; anything else is a path."""


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel:
    """A model as its config describes it.

    Parameters
    ----------
    name, model_type
        What was asked for; transformers' ``model_type``.
    cache
        What the cache of one request is made of.
    num_layers
        Decoder layers, those without a cache of their own included.
    num_parameters
        Numbers in all weights, those that are tied counted once.
    num_weight_bytes
        Bytes of the weights in ``dtype``; None where they are quantised, for the config does not
        tell how far.
    dtype
        Type that the config names; float32 where it names none.
    longest_tokens
        Positions that the config names; None if it names none, or no number of them.
    """

    name: str
    model_type: str
    cache: CacheShape
    num_layers: int
    num_parameters: int
    num_weight_bytes: int | None
    dtype: str
    longest_tokens: int | None


def read_config(name: str) -> ConfiguredModel:
    """Return what a planner must know of a model; no weight is fetched or used.

    Parameters
    ----------
    name
        A model's folder, its ``config.json``, a built-in name or a ``.gguf`` file (converted once), or
        else a hub id, for which alone the network is used. Code that comes with it is not run.

    Raises
    ------
    InputError
        If there is no such model, or its config cannot be read.
    ModelError
        If it is no causal decoder with a cache, or cannot be built from its config.
    """
    with quiet():
        return of_config(name, _find(name))


def of_config(name: str, config: Any) -> ConfiguredModel:
    """Return what a planner must know of the model of a config of transformers.

    Raises
    ------
    ModelError
        If it is no causal decoder with a cache, has no layers or more than ``MOST_LAYERS``, or cannot
        be built from its config.
    """
    if config.is_encoder_decoder:
        msg = (
            f"{name} ({config.model_type}) is an encoder-decoder; only causal decoders are planned."
        )
        raise ModelError(msg)
    text = config.get_text_config(decoder=True)
    num_layers = getattr(text, "num_hidden_layers", None)
    longest = getattr(text, "max_position_embeddings", None)
    if not num_layers or not 1 <= num_layers <= MOST_LAYERS:
        msg = (
            f"the config of {name} names {num_layers} layers (num_hidden_layers); planned are 1 to "
            f"{MOST_LAYERS:,}: mend it there."
        )
        raise ModelError(msg)
    dtype = config.dtype or text.dtype or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model, seen = _watched(name, config)
    if seen.end.cache is None:
        msg = f"{name} ({config.model_type}) fills no cache: it is no causal decoder."
        raise ModelError(msg)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    is_quantised = getattr(config, "quantization_config", None) is not None
    return ConfiguredModel(
        name=name,
        model_type=config.model_type,
        cache=_cache(seen),
        num_layers=num_layers,
        num_parameters=num_parameters,
        num_weight_bytes=None if is_quantised else num_parameters * dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        longest_tokens=longest if longest and 1 <= longest <= MOST_TOKENS else None,
    )


def _find(name: str) -> Any:
    """Return the config that a name points to."""
    if not name:
        msg = "the model has no name; give a built-in name, a folder, a config.json or a hub id."
        raise InputError(msg)
    place: str | Path = _folder(name)
    if isinstance(place, Path):
        _check_file(place)
        is_local = True
    else:
        is_local = not _hub_has_address()
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=is_local)
    except Exception as error:
        # No such id, no network, fields of a wrong type: each is an error of its own library.
        if is_local and not isinstance(place, Path):
            msg = (
                f"there is no folder or built-in model {name}, the hub ({ENDPOINT}) has no address "
                "here, and its cache lacks it; check the name or the network."
            )
            raise InputError(msg) from error
        msg = f"the config of {name} cannot be read: {_said(error)}; check the name or the file."
        raise InputError(msg) from error


def _check_file(place: Path) -> None:
    """Refuse a folder without a config, and a file that is none: the library's words do not tell."""
    file = place / "config.json" if place.is_dir() else place
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        msg = f"{file} cannot be read ({error.strerror}); give a model's folder or its config.json."
        raise InputError(msg) from error
    except (ValueError, RecursionError) as error:
        msg = f"{file} is no valid JSON ({error}); give a model's folder or its config.json."
        raise InputError(msg) from error
    kind = data.get("model_type") if type(data) is dict else None
    if type(kind) is not str:
        msg = f"{file} names no model_type: it is no config of transformers; give another file."
        raise InputError(msg)
    if kind not in CONFIG_MAPPING:
        msg = (
            f"{file} has the model_type {kind!r}, unknown to transformers {version('transformers')}; "
            "install a version that has it, or give --layers, --kv-heads and --head-dim instead."
        )
        raise InputError(msg)


def _hub_has_address() -> bool:
    """Whether the hub's host has an address: else only the cache is asked, and nothing tried again."""
    if urllib.request.getproxies():
        return True  # The proxy looks names up.
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def _said(error: Exception) -> str:
    """Return what a library says, on one line: what is wrong stands on its later lines."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _folder(name: str) -> Path | str:
    """Return the folder or file that holds a config, or the hub id that a name is."""
    if name in BUILTIN_MODELS:
        return converted(find_builtin(name), sha256=BUILTIN_MODELS[name].sha256)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        return converted(path)
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(name):
        msg = f"there is no model folder or file {name}; check the path."
        raise InputError(msg)
    return name


def _watched(name: str, config: Any) -> tuple[Any, Seen]:
    """Return a model without numbers, and what its pass over a few tokens showed."""
    # The model writes into its config, and looks for padding in ids that have no numbers here.
    config = copy.deepcopy(config)
    config.get_text_config(decoder=True).pad_token_id = None
    try:
        with torch.device("meta"):
            # Some expert layers are defined for bfloat16 alone; shapes are the same in all types.
            model = _kind(config).from_config(config, dtype=torch.bfloat16).eval()
            return model, watch(model, torch.zeros(1, PROBE_TOKENS, dtype=torch.long))
    except ModelError:
        raise
    except Exception as error:
        # Unknown or damaged configs, code that needs real numbers: errors of several libraries.
        msg = (
            f"{name} ({config.model_type}) cannot be built from its config: {_said(error)}; give "
            "--layers, --kv-heads and --head-dim instead."
        )
        raise ModelError(msg) from error


def _kind(config: Any) -> Any:
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reads_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if reads_images and not is_causal else AutoModelForCausalLM


def _cache(seen: Seen) -> CacheShape:
    """Return what the layers of a cache hold, with the windows that their attention names."""
    windows = {call.layer: call.window for call in seen.calls}
    cache = seen.end.cache
    layers, state_bytes = [], 0
    for store, held in zip(cache.layers, cache_layers(cache), strict=True):  # type: ignore[union-attr]
        if not held.entries:
            state_bytes += held.logical_bytes
            continue
        numbers = store.keys.shape[1] * (store.keys.shape[-1] + store.values.shape[-1])
        # Attention that goes by chunks names no window; its cache drops what left the chunk.
        window = windows.get(held.layer) or getattr(store, "sliding_window", None)
        layers.append(CachedLayer(numbers_per_token=numbers, window=window))
    return CacheShape(layers=tuple(layers), state_bytes=state_bytes)
