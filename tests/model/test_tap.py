from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests import architectures
from tracekit.errors import ModelError, UsageError
from tracekit.measure.attention import logits_HQK, visible_QK, weights_HQK
from tracekit.model.read_spec import read_spec
from tracekit.model.tap import AttentionCall, ForwardEnd, tap
from tracekit.model.versions import cache_keyword, new_cache

FAMILIES = [
    "llama",
    "llama one kv head",
    "qwen3",
    "gpt2",
    "mistral",
    "gemma2",
    "mixtral",
    "gpt_oss",
    "gemma3",
    "gpt_neox",
    "opt",
    "smollm3",
    "deepseek_v3",
    "qwen3_next",
    "jamba",
    "falcon",
    "falcon new",
    "bloom",
    "mpt",
    "gpt_neo",
]

CALLS = {"qwen3_next": [1, 3], "jamba": [1, 3]}
"""Layers that attend, where not all four do."""


class Watch:
    """Keep all calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.ends: list[ForwardEnd] = []

    def attention(self, call: AttentionCall) -> None:
        self.calls.append(call)

    def forward(self, end: ForwardEnd) -> None:
        self.ends.append(end)


def ids(num_tokens: int = 20, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 250, (batch, num_tokens))


def num_hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def generated(model: Any, **options: Any) -> torch.Tensor:
    prompt = ids(12)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=6,
        do_sample=False,
        use_cache=True,
        **{cache_keyword(model): new_cache(model)},
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_maps_are_those_of_eager_attention(family: str) -> None:
    model, watch = architectures.model(family), Watch()
    spec = read_spec(model, name=family, num_tokens=265)
    with torch.no_grad(), tap(model, watch):
        model(ids(), use_cache=False)
    eager = architectures.model(family, attn_implementation="eager")
    with torch.no_grad():
        maps = eager(ids(), use_cache=False, output_attentions=True).attentions
    maps = [one for one in maps if one is not None]
    assert [call.layer for call in watch.calls] == CALLS.get(family, [0, 1, 2, 3])
    for call, theirs in zip(watch.calls, maps, strict=True):
        layer = spec.layers[call.layer]
        seen = visible_QK(layer, 20, 20, first_query=0)
        scores = logits_HQK(call.query_BHQD[0], call.key_BGKD[0], layer)
        ours = weights_HQK(scores.masked_fill(~seen, -torch.inf), layer)
        assert (ours - theirs[0]).abs().max() < 1e-5


@pytest.mark.parametrize("family", [*FAMILIES, "mamba", "gemma3n", "falcon alibi"])
def test_the_tap_changes_no_token_and_no_bit(family: str) -> None:
    model = architectures.model(family)
    plain, bare = generated(model), num_hooks(model)
    table = dict(ALL_ATTENTION_FUNCTIONS)
    with torch.no_grad():
        logits = model(ids()).logits
    with torch.no_grad(), tap(model, Watch()):
        watched = generated(model)
        assert torch.equal(model(ids()).logits, logits)
    assert torch.equal(plain, watched)
    assert num_hooks(model) == bare
    assert dict(ALL_ATTENTION_FUNCTIONS) == table


def test_hidden_states_cover_all_positions_though_generate_scores_the_last_only() -> None:
    model, watch = architectures.model("llama"), Watch()
    with tap(model, watch):
        tokens = generated(model)
    hidden = torch.cat([end.hidden_BTE for end in watch.ends], dim=1)
    assert [end.hidden_BTE.shape[1] for end in watch.ends] == [12, 1, 1, 1, 1, 1]
    assert watch.ends[0].logits_BTV.shape[1] == 1
    with torch.no_grad():
        whole = model(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
    assert (hidden - whole).abs().max() < 1e-5


def test_decoding_shows_the_whole_cache_and_only_the_window_where_there_is_one() -> None:
    model, watch = architectures.model("gemma2"), Watch()
    with tap(model, watch):
        generated(model)
    last = {call.layer: call for call in watch.calls}
    widths = [last[layer].key_BGKD.shape[2] for layer in range(4)]
    assert widths == [8, 17, 8, 17]


def test_everything_is_gone_after_an_exception() -> None:
    model = architectures.model("llama")
    bare, table = num_hooks(model), dict(ALL_ATTENTION_FUNCTIONS)

    class Failing(Watch):
        def attention(self, call: AttentionCall) -> None:
            raise RuntimeError("observer")

    with pytest.raises(RuntimeError, match="observer"), tap(model, Failing()):
        model(ids())
    assert num_hooks(model) == bare
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    with tap(model, Watch()):
        pass


def test_an_override_of_someone_else_is_called_and_put_back() -> None:
    model, called = architectures.model("llama"), []
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return original(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs
    try:
        with torch.no_grad(), tap(model, Watch()):
            model(ids())
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
        assert len(called) == 4
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def test_a_tap_in_a_tap_is_refused_and_the_outer_one_goes_on() -> None:
    model, watch = architectures.model("llama"), Watch()
    with tap(model, watch):
        with pytest.raises(UsageError, match="open already"), tap(model, Watch()):
            pass
        model(ids())
    assert len(watch.calls) == 4


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_other_models_are_not_seen(family: str) -> None:
    model, other, watch = architectures.model(family), architectures.model(family), Watch()
    with tap(model, watch):
        other(ids())
    assert not watch.calls
    assert not watch.ends


def test_a_model_without_head_is_refused_and_leaves_no_hook() -> None:
    model = architectures.model("llama").model
    bare = num_hooks(model)
    with pytest.raises(ModelError, match="no language-model head"), tap(model, Watch()):
        pass
    assert num_hooks(model) == bare


def test_a_head_that_reads_something_else_is_refused() -> None:
    model = architectures.model("llama")
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(ModelError, match="reads something else"), tap(model, Watch()):
        generated(model)


def test_nothing_is_kept_alive_by_the_hooks_between_passes() -> None:
    model = architectures.model("llama")

    class Counting(Watch):
        def attention(self, call: AttentionCall) -> None:
            pass

        def forward(self, end: ForwardEnd) -> None:
            pass

    with torch.no_grad(), tap(model, Counting()):
        model(ids(64))
        gc.collect()
        size = (1, 64, 32)
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == size]
    assert not alive
