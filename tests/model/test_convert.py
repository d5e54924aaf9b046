from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load

from tests import tiny
from tests.model import tiny_gguf
from tracekit.errors import InputError, ModelError
from tracekit.model.builtin import BUILTIN_MODELS, find_builtin
from tracekit.model.convert import RECORD, cache_folder, converted
from tracekit.model.load import load_model

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import sys
from tracekit.model.load import load_model
said = []
loaded = load_model(sys.argv[1], say=said.append)
print(len(said), loaded.spec.fingerprint)
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


def at_once(name: str, processes: int) -> list[tuple[int, str]]:
    """Load a model in several processes; return what each said and its fingerprint."""
    command = [sys.executable, "-c", CHILD, name]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    results = [(one.communicate(timeout=300), one.returncode) for one in running]
    assert all(code == 0 for _, code in results), results
    told = [output.split() for (output, _), _ in results]
    return [(int(said), fingerprint) for said, fingerprint in told]


def test_a_gguf_is_converted_once_to_float32_safetensors(file: Path) -> None:
    said: list[str] = []
    first = load_model(str(file), say=said.append)
    second = load_model(str(file), say=said.append)
    assert len(said) == 1
    assert "converting tiny.gguf once" in said[0]
    assert first.spec == second.spec
    assert (first.spec.dtype, first.spec.num_tokens) == ("float32", 265)
    assert first.spec.revision == converted(file).name
    assert not hasattr(first.model.config, "quantization_config")


def test_the_tokenizer_of_the_file_is_kept(file: Path) -> None:
    text = "the thin \U0001f600\n"
    ids = load_model(str(file)).tokenizer(text, add_special_tokens=False).input_ids
    assert tiny.tokenizer().decode(ids) == text


def test_the_record_names_source_files_and_versions(file: Path) -> None:
    folder = converted(file)
    record = json.loads((folder / RECORD).read_text())
    assert record["source"] == {"name": "tiny.gguf", "sha256": folder.name}
    assert set(record["versions"]) >= {"transformers", "torch", "gguf"}
    for name, told in record["files"].items():
        assert (folder / name).stat().st_size == told["bytes"]


@pytest.mark.parametrize("damaged", ["model.safetensors", "tokenizer.json", RECORD])
def test_a_damaged_folder_is_converted_again_and_this_is_said(
    file: Path, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = converted(file)
    whole = load((folder / "model.safetensors").read_bytes())
    (folder / damaged).write_bytes((folder / damaged).read_bytes()[:-50])
    with caplog.at_level(logging.WARNING):
        assert converted(file) == folder
    assert "is damaged" in caplog.text
    again = load((folder / "model.safetensors").read_bytes())
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_what_a_killed_conversion_left_is_cleared_away(file: Path) -> None:
    folder = converted(file)
    left = folder.rename(folder.with_name(f".{folder.name}"))
    (left / "old").write_text("x")
    converted(file)
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        folder.name,
        f"{folder.name}.lock",
    ]
    assert not (folder / "old").exists()


@pytest.mark.parametrize("length", [0, 3, 100, 5_000, 60_000, -10])
def test_a_cut_off_file_is_refused_and_leaves_nothing(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(InputError, match=r"tiny\.gguf") as caught:
        converted(file)
    assert "\n" not in str(caught.value)
    assert not list(cache_folder().rglob("*.safetensors"))


def test_foreign_absent_and_incomplete_files_are_refused(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(InputError, match="is no GGUF file"):
        load_model(str(other))
    with pytest.raises(InputError, match="No such file"):
        load_model(str(tmp_path / "absent.gguf"))
    tiny_gguf.write(file, left_out="blk.1.attn_q")
    with pytest.raises(ModelError, match=r"lack model\.layers\.1"):
        load_model(str(file))


def test_a_file_that_is_not_the_expected_one_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match="install it again"):
        converted(file, sha256="0" * 64)


def test_a_cache_folder_that_cannot_be_made_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEKIT_CACHE", str(file / "below"))
    with pytest.raises(InputError, match="set TRACEKIT_CACHE"):
        converted(file)


def test_processes_that_want_the_same_model_convert_it_once(file: Path) -> None:
    results = at_once(str(file), 2)
    assert sorted(said for said, _ in results) == [0, 1]
    assert len({fingerprint for _, fingerprint in results}) == 1


@pytest.mark.slow
def test_the_builtin_model_is_converted_once_by_two_processes_and_is_whole() -> None:
    results = at_once("smollm2-135m", 2)
    assert sorted(said for said, _ in results) == [0, 1]
    said: list[str] = []
    loaded = load_model("smollm2-135m", say=said.append)
    spec = loaded.spec
    assert not said
    assert {fingerprint for _, fingerprint in results} == {spec.fingerprint}
    assert spec.revision == BUILTIN_MODELS["smollm2-135m"].sha256
    assert find_builtin("smollm2-135m").is_file()
    assert len(spec.layers) == 30
    assert all(layer.refusal is None for layer in spec.layers)
    assert {(one.num_heads, one.num_kv_heads, one.head_dim) for one in spec.layers} == {(9, 3, 64)}
    assert (spec.num_tokens, spec.head.num_rows, spec.num_embeddings) == (49_152,) * 3
    assert (spec.max_positions, spec.trained_positions) == (None, 8_192)
    assert spec.head.is_tied
    assert spec.kv_bytes(1) == 2 * 30 * 3 * 64 * 2
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = loaded.model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(output[0])
