"""A GGUF file is turned into safetensors once; later loads are ten times as fast."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from tracekit.errors import InputError
from tracekit.model.refusals import reason, refuse_missing
from tracekit.model.versions import quiet

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

RECORD = "conversion.json"
"""File that tells from what, by what and to what a folder was converted."""

_MAGIC = b"GGUF"


def cache_folder() -> Path:
    """Return where converted models are kept: ``TRACEKIT_CACHE``, else the platform's folder."""
    named = os.environ.get("TRACEKIT_CACHE")
    return Path(named) if named else Path(platformdirs.user_cache_dir("tracekit"))


def converted(
    gguf: Path, *, sha256: str | None = None, say: Callable[[str], None] = logger.info
) -> Path:
    """Return the folder with a GGUF file's model as float32 safetensors, converting it if need be.

    The folder is named by the file's SHA-256 and appears whole or not at all. A second process that
    wants the same waits for the first. A folder that is damaged is made again.

    Parameters
    ----------
    gguf
        The file.
    sha256
        What its SHA-256 must be, where that is known.
    say
        Told what takes long.

    Raises
    ------
    InputError
        If the file is no GGUF, is cut off, is not the expected one, or the disk is full.
    ModelError
        If it lacks weights.
    """
    digest = _gguf_digest(gguf)
    if sha256 is not None and digest != sha256:
        msg = f"{gguf} is damaged: its SHA-256 is {digest[:12]}..., not {sha256[:12]}...; install it again."
        raise InputError(msg)
    folder = cache_folder() / "models" / digest
    if _damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            # Another process may have converted it while this one waited.
            damage = _damage(folder)
            if damage is not None:
                if folder.exists():
                    logger.warning("%s is damaged (%s) and is converted again.", folder, damage)
                    shutil.rmtree(folder)
                say(f"converting {gguf.name} once, about 20 s for 0.1 GB")
                _convert(gguf, digest, folder)
    except (OSError, SafetensorError) as error:
        msg = f"{folder} cannot be written ({reason(error)}); free space or set TRACEKIT_CACHE."
        raise InputError(msg) from error
    return folder


def _gguf_digest(gguf: Path) -> str:
    """Return the SHA-256 of a file that begins as GGUF files do."""
    try:
        with gguf.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                msg = f"{gguf} is no GGUF file: it does not begin with {_MAGIC.decode()}."
                raise InputError(msg)
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        msg = f"{gguf} cannot be read ({error.strerror}); check the path."
        raise InputError(msg) from error


def _convert(gguf: Path, digest: str, folder: Path) -> None:
    """Write the model's folder beside its place, then rename it; the lock is held."""
    model, tokenizer = _read_gguf(gguf)
    temporary = folder.with_name(f".{folder.name}")
    # What a conversion that was killed has left.
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with quiet():
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        record = _record(gguf, digest, temporary)
        (temporary / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _sync(folder.parent)


def _record(gguf: Path, digest: str, folder: Path) -> dict[str, Any]:
    """Return from what, by what and to which files a folder was converted."""
    packages = ("transformers", "torch", "gguf", "safetensors")
    return {
        "source": {"name": gguf.name, "sha256": digest},
        "versions": {name: version(name) for name in packages},
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for path in sorted(folder.iterdir())
        },
    }


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of a GGUF file, float32, free of every trace of quantisation."""
    named = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **named)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                **named,
                dtype=torch.float32,
                # Otherwise packed files look for an attention kernel on the hub.
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:
        # A damaged file fails in the reader in any of a dozen ways.
        msg = f"{gguf} cannot be read as a model ({reason(error)}); it may be cut off or of an unknown kind."
        raise InputError(msg) from error
    model, info = loaded
    refuse_missing(str(gguf), info)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    elif hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _damage(folder: Path) -> str | None:
    """Return what is wrong with a converted folder, None if every file has its size."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        sizes = {name: (folder / name).stat().st_size for name in files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return reason(error)
    wrong = [name for name, size in sizes.items() if size != files[name]["bytes"]]
    return f"{wrong[0]} has another size" if wrong else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
