"""Loading a model with its tokenizer and its spec, from wherever its name points."""

from __future__ import annotations

import difflib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tracekit.errors import InputError, ModelError, UsageError
from tracekit.model.builtin import BUILTIN_MODELS, find_builtin
from tracekit.model.convert import converted
from tracekit.model.placement import Placement
from tracekit.model.read_spec import read_spec
from tracekit.model.refusals import reason, refuse_missing
from tracekit.model.versions import quiet
from tracekit.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracekit.spec import ModelSpec

logger = logging.getLogger(__name__)

DTYPES: dict[str, Any] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Types in which a model can compute; auto is the type of the stored weights."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""What may be a hub id: a name, or an owner and a name; anything else is a path."""

_HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
_HUB_NOT = ["*/*", "consolidated*"]
"""Weights in another layout, or in folders for other programs, are not fetched twice."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and what a replay must know about it."""

    model: Any
    tokenizer: Any
    spec: ModelSpec

    def require(self, spec: ModelSpec) -> None:
        """Refuse to stand in for another model.

        Raises
        ------
        ModelError
            If the fingerprint is not that of ``spec``.
        """
        if self.spec.fingerprint != spec.fingerprint:
            msg = (
                f"{self.spec.name} ({self.spec.dtype}) is not the model of the trace, {spec.name} "
                f"({spec.dtype}): fingerprint {self.spec.fingerprint[:12]}, not {spec.fingerprint[:12]}; "
                "load the weights and the dtype with which it was recorded."
            )
            raise ModelError(msg)


@dataclass(frozen=True)
class _Source:
    """A folder with a model, and the commit or hash it stands for."""

    folder: Path
    revision: str | None


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = logger.info,
) -> LoadedModel:
    """Return a model in evaluation mode, with its tokenizer and spec.

    Only safetensors are read, never pickles; attention stays the model's default. The network is
    used for hub ids alone.

    Parameters
    ----------
    name
        A built-in name (``smollm2-135m``), a folder, a ``.gguf`` file, or else a hub id.
    dtype
        ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.
    device
        ``auto`` (CUDA if there is one), ``cpu``, ``cuda``, ``cuda:1`` ...
    device_map
        How to spread the model over devices, memory and disk, instead of ``device``: ``auto``,
        ``balanced``, ``balanced_low_0``, ``sequential``, or a JSON object of parts and places. None:
        the whole model on one device.
    trust_remote_code
        Whether Python code that comes with the model may run.
    say
        Told what takes long: a conversion, a download.

    Raises
    ------
    UsageError
        If there is no such dtype, device or device map.
    InputError
        If there is no such model, or its files are not as they must be.
    ModelError
        If it lacks weights, is no causal decoder, or its logits do not follow from hidden states.
    """
    if dtype not in DTYPES:
        raise UsageError(unknown("dtype", dtype, list(DTYPES)))
    placement = Placement.of(device, device_map)
    source = _find(name, trust_remote_code=trust_remote_code, say=say)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with quiet():
        kind = _kind(name, source.folder, options)
        tokenizer = _read_tokenizer(name, source.folder, options)
        options |= {"dtype": DTYPES[dtype], **placement.options()}
        model = placement.place(_read_model(name, kind, source.folder, options))
        model.eval().requires_grad_(False)
        # MPT's config turns the cache off, and a recording is of what it holds.
        model.generation_config.use_cache = True
        spec = read_spec(model, name=name, num_tokens=len(tokenizer), revision=source.revision)
    return LoadedModel(model=model, tokenizer=tokenizer, spec=spec)


def _find(name: str, *, trust_remote_code: bool, say: Callable[[str], None]) -> _Source:
    """Return the folder that a name points to, converted or fetched if need be."""
    if name in BUILTIN_MODELS:
        sha256 = BUILTIN_MODELS[name].sha256
        return _Source(converted(find_builtin(name), sha256=sha256, say=say), sha256)
    if not name:
        msg = "the model has no name; give a built-in name, a folder, a .gguf file or a hub id."
        raise InputError(msg)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        folder = converted(path, say=say)
        return _Source(folder, folder.name)
    if path.is_dir():
        return _Source(path, None)
    if path.exists():
        msg = f"{name} is a file; give a model's folder, a .gguf file, or a hub id."
        raise InputError(msg)
    if not _HUB_ID.fullmatch(name):
        msg = f"there is no model folder or file {name}; check the path."
        raise InputError(msg)
    say(f"looking for {name} on the hub")
    folder = _fetch(name, trust_remote_code=trust_remote_code)
    return _Source(folder, folder.name)


def _fetch(name: str, *, trust_remote_code: bool) -> Path:
    """Return the folder of a hub id's files, as the hub's own cache keeps them, by commit."""
    wanted = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=_HUB_NOT))
    except Exception as error:
        # No such id, no access, no network: each comes as an error of its own library.
        near = difflib.get_close_matches(name, BUILTIN_MODELS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ", check the name and the network."
        msg = (
            f"there is no model {name!r}: neither built in ({', '.join(BUILTIN_MODELS)}), nor a folder, "
            f"nor to be had from the hub ({type(error).__name__}){hint}"
        )
        raise InputError(msg) from error


def _kind(name: str, folder: Path, options: dict[str, Any]) -> Any:
    """Return the class that reads such a model, before any weight is read."""
    try:
        config = AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        msg = f"the config of {name} cannot be read: {reason(error)}"
        raise InputError(msg) from error
    if config.is_encoder_decoder:
        msg = f"{name} ({config.model_type}) is an encoder-decoder; only causal decoders are recorded."
        raise ModelError(msg)
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reads_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if reads_images and not is_causal else AutoModelForCausalLM


def _read_tokenizer(name: str, folder: Path, options: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        msg = f"the tokenizer of {name} cannot be read: {reason(error)}"
        raise InputError(msg) from error


def _read_model(name: str, kind: Any, folder: Path, options: dict[str, Any]) -> Any:
    """Return the model; refuse it if a weight was not in its files."""
    try:
        loaded: Any = kind.from_pretrained(
            folder, **options, use_safetensors=True, output_loading_info=True
        )
    except OSError as error:
        msg = (
            f"{name} has no whole safetensors weights (pickle files are not read): {reason(error)}"
        )
        raise InputError(msg) from error
    except Exception as error:
        # Unknown architectures, weights of other shapes, damaged files: errors of three libraries.
        msg = f"{name} cannot be loaded as a causal language model: {reason(error)}"
        raise ModelError(msg) from error
    model, info = loaded
    refuse_missing(name, info)
    return model
