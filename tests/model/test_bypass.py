from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import _len_torch_function_stack

from tests import architectures
from tests.model.test_tap import Watch, generated, ids, num_hooks
from tracekit.model.bypass import bypassing_hooks
from tracekit.model.decoder import decoder_of
from tracekit.model.read_spec import CHECK_GATES, check_attention, read_spec
from tracekit.model.tap import tap

BYPASSING = ["falcon", "falcon new", "bloom", "mpt", "gpt_neo"]
HAVE_TABLE = ["llama", "gpt2", "opt", "gemma2", "jamba", "qwen3_next", "mamba"]


@pytest.mark.parametrize("family", BYPASSING)
def test_keys_and_values_are_those_of_the_cache(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    with torch.no_grad(), tap(model, watch):
        model(ids(), use_cache=True)
    for call, store in zip(watch.calls, watch.ends[0].cache.layers, strict=True):
        assert torch.equal(call.key_BGKD, store.keys)
        assert torch.equal(call.value_BGKD, store.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_that_are_widened_for_the_softmax_are_given_in_the_type_of_the_cache(
    dtype: torch.dtype,
) -> None:
    model, watch = architectures.model("gpt_neo").to(dtype), Watch()
    with torch.no_grad(), tap(model, watch):
        model(ids(), use_cache=True)
    for call, store in zip(watch.calls, watch.ends[0].cache.layers, strict=True):
        assert call.query_BHQD.dtype == dtype
        assert torch.equal(call.key_BGKD, store.keys)


@pytest.mark.parametrize("family", BYPASSING)
def test_each_step_of_a_generation_attends_as_the_spec_says(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    layers = read_spec(model, name=family, num_tokens=265).layers
    with tap(model, watch):
        generated(model)
    assert len(watch.calls) == 4 * 6
    for call in watch.calls:
        assert check_attention(call, layers[call.layer]) < CHECK_GATES["float32"]


@pytest.mark.parametrize("family", BYPASSING)
def test_padded_rows_of_a_batch_are_seen_with_their_mask(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    layers = read_spec(model, name=family, num_tokens=265).layers
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad(), tap(model, watch):
        model(ids(12, batch=2), attention_mask=mask)
    assert len(watch.calls) == 4
    for call in watch.calls:
        assert call.query_BHQD.shape[0] == 2
        whole = {name: getattr(call, name)[1:] for name in ("query_BHQD", "key_BGKD", "value_BGKD")}
        visible = call.mask[1:] if torch.is_tensor(call.mask) else None
        one = type(call)(
            **{**vars(call), **whole, "mask": visible, "output_BQHD": call.output_BQHD[1:]}
        )
        assert check_attention(one, layers[call.layer]) < CHECK_GATES["float32"]
        if call.mask is not None and call.mask.dtype == torch.bool:
            assert not call.mask[0, :, 5:, :5].any()


@pytest.mark.parametrize("family", HAVE_TABLE)
def test_models_that_use_the_table_are_not_watched(family: str) -> None:
    decoder = decoder_of(architectures.model(family))
    assert not list(bypassing_hooks(decoder, lambda layer, seen: None))


@pytest.mark.parametrize("family", BYPASSING)
def test_nothing_stays_watched_after_an_exception(family: str) -> None:
    model = architectures.model(family)
    bare, before = num_hooks(model), _len_torch_function_stack()

    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("inside")

    attention = [m for m in model.modules() if "Attention" in type(m).__name__][-1]
    inner = next(m for m in attention.children() if isinstance(m, torch.nn.Linear))
    handle = inner.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside"), tap(model, Watch()):
        model(ids())
    handle.remove()

    class Failing(Watch):
        def attention(self, call: Any) -> None:
            raise RuntimeError("observer")

    with pytest.raises(RuntimeError, match="observer"), tap(model, Failing()):
        model(ids())
    assert num_hooks(model) == bare
    assert _len_torch_function_stack() == before


def test_what_is_outside_the_attention_modules_is_not_watched() -> None:
    model, depth = architectures.model("bloom"), []
    for module in model.modules():
        if "Attention" not in type(module).__name__:
            module.register_forward_pre_hook(
                lambda module, args: depth.append((type(module), _len_torch_function_stack()))
            )
    with torch.no_grad(), tap(model, Watch()):
        model(ids())
    assert {size for kind, size in depth if "MLP" in kind.__name__ or "Norm" in kind.__name__} == {
        0
    }
