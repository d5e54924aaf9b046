from __future__ import annotations

import json
import socket
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from tests import architectures, tiny
from tracekit.errors import InputError, ModelError
from tracekit.measure.memory import MOST_LAYERS
from tracekit.model.cache_bytes import cache_layers
from tracekit.model.probe import watch
from tracekit.model.read_config import of_config, read_config
from tracekit.model.read_spec import read_spec

if TYPE_CHECKING:
    from pathlib import Path

    from tracekit.measure.memory import CacheShape

CAUSAL = sorted(architectures.SETTINGS.keys() - {"bert"})
BY_THE_CACHE = {"llama4", "deepseek_v3"}
"""Specs refuse to replay these: attention does not see what their caches hold."""


def config_of(family: str) -> Any:
    model_type, settings = architectures.SETTINGS[family]
    merged = {**tiny.SETTINGS, "num_key_value_heads": 2, **settings}
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in merged.items() if value is not None}
    )


def kv_bytes(cache: CacheShape, num_tokens: int, item: int) -> int:
    """Return the bytes by a plain loop."""
    total = 0
    for layer in cache.layers:
        held = num_tokens if layer.window is None else min(num_tokens, layer.window)
        total += held * layer.numbers_per_token * item
    return total


@pytest.mark.parametrize("family", CAUSAL)
def test_what_a_config_tells_is_what_the_loaded_model_shows(family: str) -> None:
    model = architectures.model(family)
    read = of_config(family, config_of(family))
    spec = read_spec(model, name=family, num_tokens=265)
    assert read.num_parameters == spec.num_parameters
    assert read.num_layers == len(spec.layers)
    assert read.num_weight_bytes == 4 * read.num_parameters
    if family not in BY_THE_CACHE:
        for num_tokens in (1, 7, 8, 9, 20, 500):
            assert kv_bytes(read.cache, num_tokens, 2) == spec.kv_bytes(num_tokens)


@pytest.mark.parametrize("family", sorted({*BY_THE_CACHE, "llama", "qwen3_next", "jamba", "mamba"}))
def test_layers_are_counted_as_the_cache_holds_them(family: str) -> None:
    model = architectures.model(family).to(torch.bfloat16)
    read = of_config(family, config_of(family))
    for num_tokens in (5, 20):
        held = cache_layers(watch(model, torch.ones(1, num_tokens, dtype=torch.long)).end.cache)
        # A sliding layer of transformers keeps one entry less between passes than it reads.
        ours = read.cache.state_bytes + sum(
            layer.numbers_per_token
            * 2
            * (num_tokens if layer.window is None else min(num_tokens, layer.window - 1))
            for layer in read.cache.layers
        )
        assert sum(one.logical_bytes for one in held) == ours


@pytest.mark.parametrize("family", sorted(architectures.VISION))
def test_a_vision_model_is_counted_by_its_text_model(family: str) -> None:
    model = architectures.vision_model(family)
    read = of_config(family, type(model.config).from_dict(model.config.to_dict()))
    spec = read_spec(model, name=family, num_tokens=265)
    assert kv_bytes(read.cache, 20, 2) == spec.kv_bytes(20)
    assert read.num_parameters == spec.num_parameters


def test_a_folder_and_its_config_file_read_the_same_without_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes((model_folder / "config.json").read_bytes())
    by_folder, by_file = read_config(str(model_folder)), read_config(str(file))
    assert by_folder.cache == by_file.cache
    assert by_folder.num_weight_bytes == by_file.num_weight_bytes
    assert by_folder.longest_tokens == 512


def test_reading_a_config_leaves_it_as_it_was() -> None:
    config = config_of("llama")
    before = config.to_dict()
    of_config("x", config)
    assert config.to_dict() == before


def test_weights_take_the_bytes_of_the_type_that_the_config_names(tmp_path: Path) -> None:
    config = config_of("llama")
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    read = read_config(str(tmp_path))
    assert read.dtype == "bfloat16"
    assert read.num_weight_bytes == 2 * read.num_parameters


def test_quantised_weights_are_not_guessed(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    quantised = data | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(quantised), encoding="utf-8")
    assert read_config(str(file)).num_weight_bytes is None


@pytest.mark.parametrize("num_layers", [0, -3, MOST_LAYERS + 1, 10**7])
def test_a_number_of_layers_that_no_model_has_is_refused_before_anything_is_built(
    num_layers: int, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": num_layers}))
    with pytest.raises(ModelError, match=rf"names {num_layers} layers .*planned are 1 to 1,000"):
        read_config(str(file))


@pytest.mark.parametrize("longest", [-1, 0, 2**40 + 1, 10**400])
def test_a_longest_text_that_no_model_has_is_not_known(longest: int) -> None:
    config = config_of("llama")
    config.max_position_embeddings = longest
    assert of_config("x", config).longest_tokens is None


def test_a_hub_id_without_a_network_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    with pytest.raises(InputError, match="no folder or built-in model no-owner/no-such-model"):
        read_config("no-owner/no-such-model")


def test_a_model_that_looks_ahead_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"bert.*no causal decoder"):
        of_config("bert", config_of("bert"))


def test_an_encoder_decoder_is_refused_by_name() -> None:
    config = AutoConfig.for_model("t5")
    with pytest.raises(ModelError, match=r"small \(t5\) is an encoder-decoder"):
        of_config("small", config)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", r"config\.json is no valid JSON"),
        ("config.json", "[" * 100_000, r"config\.json is no valid JSON"),
        ("config.json", "[]", "names no model_type"),
        ("config.json", '{"model_type": ["llama"]}', "names no model_type"),
        ("config.json", '{"model_type": "no-such-model"}', "'no-such-model', unknown to transf"),
        (
            "config.json",
            '{"model_type": "llama", "hidden_size": "x"}',
            "'hidden_size' expected int",
        ),
        (".", None, r"config\.json cannot be read \(No such file"),
        ("no/such/folder", None, "there is no model folder or file"),
        ("", None, "has no name"),
    ],
)
def test_what_is_no_config_is_one_sentence(
    name: str, text: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        read_config(str(path) if name else "")
