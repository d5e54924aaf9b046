"""Families inside the model: amounts side by side, layers and rows that are not run again."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import architectures
from tests.kv.cases import SEED, TEXTS, family, head_file
from tests.live.attending import attending
from tests.live.cells import (
    NAMES,
    NUM_ROWS,
    POINT,
    logits_of,
    random_ids,
    spans_of,
    tiny_model,
    tiny_run,
)
from tracekit.errors import InputError, UsageError
from tracekit.kv.budget import Cache
from tracekit.kv.engine import NEVER
from tracekit.kv.parse import parse
from tracekit.kv.replay import Family, Setting
from tracekit.live.driver import drive
from tracekit.live.planned import planned
from tracekit.live.pruned import Pruned
from tracekit.live.run import FullRun, full_run
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec
from tracekit.model.resume import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tracekit.kv.policy import Policy
    from tracekit.kv.schedule import Spans

AMOUNTS = ["0.2", "0.5", "3tok", "0.9"]

CLOSE = {"gemma2": 1e-5, "gemma3n": 1e-5}
"""Hidden states of models whose norms round to float32; all others are of float64."""


def assert_close(run: FullRun, found: torch.Tensor, true: torch.Tensor) -> None:
    atol = CLOSE.get(run.spec.name, 1e-9)
    torch.testing.assert_close(found, true, atol=atol, rtol=0)


SIDE_BY_SIDE = [
    *(text for text in TEXTS if not parse(text).scorer.needs.influence),
    "h2o:every=3+int4:group=2,residual=3",
    "snapkv:window=2+lowrank:rank=2,residual=4",
    "streamingllm:every=2",
    "h2o:every=5,evict-prompt=6",
    "adakv:window=2,evict-prompt=5",
]


def setting_of(run: FullRun, spans: Spans | None = None, seed: int = SEED) -> Setting:
    layers = tuple(one for one in run.spec.layers if one.holds_keys)
    return Setting(layers=(), cache=Cache(layers), spans=spans or spans_of(run), seed=seed)


def policies_of(text: str, run: FullRun, kept: Sequence[str] = AMOUNTS) -> list[Policy]:
    """Return a family, with a file that fits the model if it reads one."""
    policies, layers = family(text, kept), run.spec.layers
    budget: Any = policies[0].layers
    if getattr(budget, "file", None) != "":
        return policies
    file = head_file(len(layers), layers[0].num_kv_heads)
    return [replace(one, layers=replace(budget, file=file)) for one in policies]


def run_family(
    run: FullRun,
    policies: Sequence[Policy],
    setting: Setting | None = None,
    *,
    from_below: bool = False,
    **more: Any,
) -> tuple[Pruned, torch.Tensor]:
    """Return policies that were run side by side, and hidden states [B, R, E]."""
    setting = setting or setting_of(run)
    pruned = Pruned(run, planned(run, policies, setting), setting, **more)
    first_layer = 0 if from_below else pruned.first_layer
    hidden_BRE = drive(
        run, pruned, pruned.first_row, num_runs=pruned.num_runs, first_layer=first_layer
    )
    return pruned, hidden_BRE


@cache
def deep_run(name: str = "llama", num_rows: int = NUM_ROWS) -> FullRun:
    """Return a run of a model of 4 layers, float64."""
    model = architectures.model(name, initializer_range=0.3)
    spec = read_spec(model, name=name, num_tokens=272)
    loaded = LoadedModel(model=model.double(), tokenizer=None, spec=spec)
    return full_run(loaded, random_ids(num_rows))


@contextmanager
def counted(model: Any) -> Iterator[Counter[int]]:
    """Count the rows that each layer's attention is asked for."""
    rows: Counter[int] = Counter()

    def count(number: int) -> Any:
        def see(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            rows[number] += hidden.shape[0] * hidden.shape[1]

        return see

    handles = [
        layer.self_attn.register_forward_pre_hook(count(number), with_kwargs=True)
        for number, layer in enumerate(decoder_layers(model))
    ]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def assert_same(found: Pruned, place: int, true: Pruned, layers: Sequence[int]) -> None:
    """Compare what one of several runs held with a run of its own."""
    for layer in layers:
        assert torch.equal(found.evicted_at[layer][place], true.evicted_at[layer][0])
        for some, one in zip(found.entries[layer], true.entries[layer], strict=True):
            assert torch.equal(some[:, place], one[:, 0])
    assert found.is_clipped_B[place] == true.is_clipped_B[0]
    assert found.is_clamped_B[place] == true.is_clamped_B[0]


@pytest.mark.parametrize(("n", "text"), list(enumerate(SIDE_BY_SIDE)))
def test_amounts_side_by_side_equal_each_alone(n: int, text: str) -> None:
    run = tiny_run("llama" if "streamingllm" in text else NAMES[n % len(NAMES)])
    policies = policies_of(text, run)
    together, hidden_BRE = run_family(run, policies)
    for place, policy in enumerate(policies):
        alone, hidden_1RE = run_family(run, [policy])
        assert_close(run, hidden_BRE[place], hidden_1RE[0])
        assert_same(together, place, alone, sorted(alone.entries))


@settings(max_examples=25)
@given(
    text=st.sampled_from([one for one in TEXTS if not parse(one).scorer.needs.influence]),
    model=st.sampled_from(NAMES),
    point=st.integers(1, NUM_ROWS - 1),
    kept=st.lists(st.sampled_from(["0.1", "0.3", "2tok", "1tok", "30tok"]), min_size=2, max_size=3),
)
def test_any_family_at_any_point_is_its_policies_alone(
    text: str, model: str, point: int, kept: list[str]
) -> None:
    run = tiny_run(model)
    policies, setting = policies_of(text, run, kept), setting_of(run, spans_of(run, point))
    together, hidden_BRE = run_family(run, policies, setting)
    for place, policy in enumerate(policies):
        alone, hidden_1RE = run_family(run, [policy], setting)
        assert_close(run, hidden_BRE[place], hidden_1RE[0])
        assert_same(together, place, alone, sorted(alone.entries))


@pytest.mark.parametrize(
    "texts", [["h2o:every=3", "h2o", "observed"], ["snapkv:window=2", "adakv:window=2"]]
)
def test_first_scores_that_families_share_change_no_bit(texts: list[str]) -> None:
    run = tiny_run("qwen3")
    scores: dict[Any, torch.Tensor] = {}
    for text in texts * 2:
        policies = policies_of(text, run)
        shared, hidden_BRE = run_family(run, policies, scores=scores)
        own, own_BRE = run_family(run, policies)
        assert torch.equal(hidden_BRE, own_BRE)
        for layer, evicted_at in own.evicted_at.items():
            assert torch.equal(evicted_at, shared.evicted_at[layer])
    assert scores


def test_a_family_that_was_scored_already_is_not_scored_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tracekit.kv.scorers.key_norm import KeyNorm

    run, own, called = tiny_run("llama"), KeyNorm.score, []
    scores: dict[Any, torch.Tensor] = {}

    def score(self: KeyNorm, view: Any) -> torch.Tensor:
        called.append(1)
        return own(self, view)

    monkeypatch.setattr(KeyNorm, "score", score)
    for text in ("knorm", "knorm:recent=2"):
        run_family(run, policies_of(text, run), scores=scores)
    assert len(called) == len(run.spec.layers)


def upper_only(folder: Path, num_full: int, num_layers: int = 4, text: str = "headkv") -> str:
    """Return a policy whose budget leaves the lower layers everything."""
    file = folder / "heads.json"
    file.write_text(
        json.dumps([[1000.0 if at < num_full else 1.0] * 2 for at in range(num_layers)])
    )
    return f"{text}:file={file},head_floor=0,window=2"


@pytest.mark.parametrize("num_full", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["at=prompt", "at=prompt,evict-prompt=7"])
def test_a_policy_that_prunes_upper_layers_begins_there(
    tmp_path: Path, num_full: int, schedule: str
) -> None:
    run = deep_run()
    policies = family(f"{upper_only(tmp_path, num_full)},{schedule}", ["0.9", "0.95"])
    whole, whole_BRE = run_family(run, policies, from_below=True)
    with counted(run.loaded.model) as rows:
        found, hidden_BRE = run_family(run, policies)
    assert found.first_layer == num_full
    num_new = 2 * (NUM_ROWS - found.first_row)
    assert rows == dict.fromkeys(range(num_full, 4), num_new)
    assert_close(run, hidden_BRE, whole_BRE)
    for layer in range(num_full, 4):
        assert (found.evicted_at[layer] < NEVER).any()
        assert torch.equal(found.evicted_at[layer], whole.evicted_at[layer])
    for layer in range(num_full):
        assert not (whole.evicted_at[layer] < NEVER).any()
        assert layer not in found.evicted_at
    assert torch.equal(found.is_clamped_B, whole.is_clamped_B)
    assert torch.equal(found.is_clipped_B, whole.is_clipped_B)


@pytest.mark.parametrize("text", ["full", "h2o:every=3", "streaming", "tova"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_budget_that_is_never_short_is_the_full_cache_and_one_layer_is_run(
    text: str, name: str
) -> None:
    run = deep_run(name)
    policies = family(text, ["1.0", "100tok"])
    with counted(run.loaded.model) as rows:
        pruned, hidden_BRE = run_family(run, policies)
    assert set(rows) == {3}
    for hidden_RE in hidden_BRE:
        assert_close(run, hidden_RE, run.hidden_TE[POINT:])
    from_below, _ = run_family(run, policies, from_below=True)
    assert torch.equal(pruned.is_clamped_B, from_below.is_clamped_B)
    # Tokens are more than there are; a fraction is, where a window holds fewer.
    if text != "full":
        assert pruned.is_clamped_B.tolist() == [name != "llama", True]


def test_what_is_stored_otherwise_is_run_from_below() -> None:
    run = deep_run()
    for text in ("full:kept=1.0+int4:group=2,residual=2", "streamingllm:kept=1.0"):
        pruned, _ = run_family(run, [parse(text)])
        assert pruned.first_layer == 0


@pytest.mark.parametrize(("point", "num_policies"), [(1, 1), (POINT, 3), (NUM_ROWS - 1, 2)])
def test_rows_before_the_point_are_never_run_again(point: int, num_policies: int) -> None:
    run = deep_run()
    policies = family("knorm", ["0.1", "0.2", "0.3"][:num_policies])
    with counted(run.loaded.model) as rows:
        pruned, hidden_BRE = run_family(run, policies, setting_of(run, spans_of(run, point)))
    assert pruned.first_row == point
    assert hidden_BRE.shape[:2] == (num_policies, NUM_ROWS - point)
    assert set(rows.values()) == {num_policies * (NUM_ROWS - point)}


@pytest.mark.parametrize("chunk", [1, 4, 5, 16, 40])
def test_a_prompt_under_eviction_is_run_from_the_end_of_its_first_chunk(chunk: int) -> None:
    run = deep_run()
    pruned, hidden_1RE = run_family(run, [parse(f"knorm:kept=0.5,evict-prompt={chunk}")])
    assert pruned.decisions == (*range(chunk, POINT, chunk), POINT)
    assert hidden_1RE.shape[1] == NUM_ROWS - pruned.first_row
    evicted_at = torch.cat([one.flatten() for one in pruned.evicted_at.values()])
    assert set(evicted_at.unique().tolist()) <= {*pruned.decisions, NEVER}
    if chunk < POINT:
        assert (evicted_at == chunk).any() or chunk == 1


def test_chunks_of_a_prompt_forget_what_a_whole_prompt_would_keep() -> None:
    run = deep_run()
    in_chunks, whole = (
        run_family(run, [parse(f"h2o:kept=0.3,every=4{more}")])[0]
        for more in (",evict-prompt=4", "")
    )
    for layer, evicted_at in in_chunks.evicted_at.items():
        held, other = (one[..., :POINT] > POINT for one in (evicted_at, whole.evicted_at[layer]))
        assert held.sum() == other.sum()
    assert any(
        not torch.equal(one > POINT, whole.evicted_at[layer] > POINT)
        for layer, one in in_chunks.evicted_at.items()
    )


@pytest.mark.parametrize("text", ["h2o:every=3", "knorm", "streaming"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_what_a_window_has_let_go_is_not_evicted_nor_counted(text: str, name: str) -> None:
    run = deep_run(name)
    pruned, _ = run_family(run, family(text, ["0.1", "0.3", "0.8"]))
    for layer, evicted_at_BGK in pruned.evicted_at.items():
        window = run.spec.layers[layer].window or NUM_ROWS
        position_K = torch.arange(NUM_ROWS)
        gone = evicted_at_BGK < NEVER
        assert (evicted_at_BGK[gone] <= (position_K + window).expand_as(gone)[gone]).all()
        held_BGR = pruned.entries[layer].held_NLGR[0]
        for row in range(POINT, NUM_ROWS):
            left = (evicted_at_BGK > row) & (position_K <= row) & (position_K > row - window)
            assert torch.equal(held_BGR[..., row - POINT], left.sum(-1))


def shared_run() -> FullRun:
    """Return a run of a model whose upper layers read the keys of the lower ones."""
    return deep_run("gemma3n")


class SharingDecoder:
    """Decodes token by token; what an owner drops is gone for all that read its keys."""

    def __init__(self, run: FullRun, policy: Policy, due: Sequence[int]) -> None:
        self.specs, self.policy, self.due = run.spec.layers, policy, due
        self.model = run.loaded.model
        self.rows: dict[int, list[list[tuple[int, np.ndarray, np.ndarray]]]] = {
            one.index: [[] for _ in range(one.num_kv_heads)] for one in self.specs if one.holds_keys
        }
        self.start = 0
        self.last: dict[int, dict[int, float]] = {}

    def run(self, ids: Sequence[int]) -> torch.Tensor:
        hidden = []
        with torch.no_grad(), attending(self.model, self.attend):
            for t, token in enumerate(ids):
                if t in self.due:
                    for layer in self.rows:
                        self.rows[layer] = [self.kept(one, layer, t) for one in self.rows[layer]]
                self.start = t
                output = self.model.get_decoder()(
                    input_ids=torch.tensor([[token]]),
                    position_ids=torch.tensor([[t]]),
                    use_cache=False,
                )
                hidden.append(output[0][0, 0])
        return torch.stack(hidden)

    def kept(self, rows: list[Any], layer: int, t: int) -> list[Any]:
        """Keep sinks and the newest (streaming), or what the newest row attends to (TOVA)."""
        budget = max(1, self.policy.kept.of(t))  # type: ignore[union-attr]
        if self.policy.name == "tova":
            last = self.last[layer]
            order = sorted(rows, key=lambda one: (one[0] < t - 1, -last[one[0]], -one[0]))
        else:
            order = sorted(rows, key=lambda one: (one[0] >= 4, -one[0]))
        return sorted(order[:budget], key=lambda one: one[0])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        spec, t = self.specs[layer], self.start
        owner = layer if spec.owner is None else spec.owner
        outputs: list[Any] = []
        seen: dict[int, float] = {}
        for g, rows in enumerate(self.rows[owner]):
            if owner == layer:
                rows.append((t, key[0, g, 0].numpy().copy(), value[0, g, 0].numpy().copy()))
                while spec.window is not None and rows[0][0] <= t - spec.window:
                    rows.pop(0)
        for h in range(spec.num_heads):
            rows = self.rows[owner][h // spec.group_size]
            logits = np.array([spec.scale * query[0, h, 0].numpy() @ k for _, k, _ in rows])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            outputs.append(sum(w * v for w, (_, _, v) in zip(weights, rows, strict=True)))
            for weight, (position, _, _) in zip(weights, rows, strict=True):
                seen[position] = seen.get(position, 0.0) + weight
        self.last[layer] = seen
        return torch.from_numpy(np.array(outputs))[None, :, None]


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "tova",
        "tova:at=prompt",
        "tova:every=3,from=prompt,evict-prompt=5",
        "streaming",
        "streaming:at=prompt",
    ],
)
@pytest.mark.parametrize("kept", ["0.3", "0.6"])
def test_layers_that_share_keys_read_what_their_owner_holds(text: str, kept: str) -> None:
    run = shared_run()
    (policy,) = family(text, [kept])
    pruned, hidden_1RE = run_family(run, [policy])
    assert pruned.first_layer == 0
    decoder = SharingDecoder(run, policy, pruned.decisions)
    hidden_TE = decoder.run(random_ids())
    logits, true = (
        logits_of(run.loaded, one) for one in (hidden_1RE[0], hidden_TE[pruned.first_row :])
    )
    torch.testing.assert_close(logits, true, atol=1e-6, rtol=0)
    assert set(pruned.evicted_at) == set(pruned.entries) == {0, 1}


@pytest.mark.parametrize("text", ["h2o:every=3", "snapkv:window=2", "adakv:window=2", "tova"])
def test_amounts_side_by_side_equal_each_alone_where_keys_are_shared(text: str) -> None:
    run = shared_run()
    policies = family(text, AMOUNTS)
    together, hidden_BRE = run_family(run, policies)
    for place, policy in enumerate(policies):
        alone, hidden_1RE = run_family(run, [policy])
        assert_close(run, hidden_BRE[place], hidden_1RE[0])
        assert_same(together, place, alone, [0, 1])


@pytest.mark.parametrize(
    "text",
    ["h2o:kept=0.5+int4", "h2o:kept=0.5+quest", "streamingllm:kept=0.5", "full:kept=1.0+lowrank"],
)
def test_what_others_read_is_not_stored_otherwise(text: str) -> None:
    run = shared_run()
    with pytest.raises(UsageError, match="layers of gemma3n read the keys of others"):
        run_family(run, [parse(text)])


def test_a_jitter_of_nothing_changes_no_bit_and_one_of_something_moves_scores() -> None:
    run = tiny_run("llama")
    policies = family("h2o:every=2", ["0.3", "0.5"])
    plain, still, moved, again = (
        run_family(run, policies, jitter=jitter) for jitter in (0.0, 0.0, 0.3, 0.3)
    )
    assert torch.equal(plain[1], still[1])
    assert not torch.equal(plain[1], moved[1])
    assert torch.equal(moved[1], again[1])
    assert any(
        not torch.equal(one, moved[0].evicted_at[layer])
        for layer, one in plain[0].evicted_at.items()
    )
    other = run_family(run, policies, setting_of(run, seed=SEED + 1), jitter=0.3)
    assert not torch.equal(moved[1], other[1])


def test_a_small_jitter_moves_no_decision_that_is_no_near_tie() -> None:
    run = tiny_run("llama")
    policies = family("h2o:every=2", ["0.3", "0.5"])
    plain, moved = (run_family(run, policies, jitter=jitter) for jitter in (0.0, 1e-12))
    assert torch.equal(plain[1], moved[1])


def test_a_jitter_leaves_the_generator_of_everybody_else_alone() -> None:
    run, state = tiny_run("llama"), torch.random.get_rng_state()
    run_family(run, family("h2o", ["0.3"]), jitter=0.1)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("text", ["streaming", "random:every=2,from=prompt", "keepodd"])
def test_scores_that_the_model_has_no_part_in_do_not_round(text: str) -> None:
    run = tiny_run("llama")
    plain, moved = (run_family(run, family(text, ["0.3"]), jitter=one) for one in (0.0, 0.5))
    assert torch.equal(plain[1], moved[1])


@pytest.mark.parametrize("text", ["oracle", "oracle_error"])
def test_bounds_that_look_ahead_are_run_and_look_ahead(text: str) -> None:
    run = deep_run()
    policies = family(text, ["0.3", "0.6"])
    assert not policies[0].causal
    pruned, hidden_BRE = run_family(run, policies)
    assert hidden_BRE.isfinite().all()
    ids = random_ids()
    later = full_run(run.loaded, ids[: POINT + 1] + random_ids(NUM_ROWS - POINT - 1, seed=4))
    other, _ = run_family(later, policies)
    assert any(
        not torch.equal(one, other.evicted_at[layer]) for layer, one in pruned.evicted_at.items()
    )


def test_influence_without_probes_is_refused() -> None:
    with pytest.raises(UsageError, match="influence probes"):
        run_family(deep_run(), [parse("influence:kept=0.4")])


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ({"prompt_end": NUM_ROWS}, "knorm:kept=0.3"),
        ({"prompt_end": NUM_ROWS + 1}, "knorm:kept=0.3"),
        ({"prompt_end": 4}, "knorm:kept=0.3,at=context"),
        ({"prompt_end": 4}, "h2o:kept=0.3,above=100"),
        ({"prompt_end": 4}, "knorm:kept=0.3,at=turn"),
    ],
)
def test_a_point_that_the_sequence_does_not_have_is_refused(
    spans: dict[str, Any], text: str
) -> None:
    run = deep_run()
    ends = replace(spans_of(run), **spans)
    with pytest.raises(UsageError, match=r"^\w+.* never decides on this sequence\.$"):
        run_family(run, [parse(text)], setting_of(run, ends))


def test_policies_that_choose_what_rows_read_come_one_by_one() -> None:
    run = deep_run()
    policies = [parse(f"h2o:kept={kept}+quest:read=0.3") for kept in (0.3, 0.5)]
    with pytest.raises(UsageError, match="give its amounts one by one"):
        Pruned(run, Family(tuple(policies)), setting_of(run))


def test_a_file_of_nothing_is_refused_by_its_family(tmp_path: Path) -> None:
    file = tmp_path / "zeros.json"
    file.write_text(json.dumps([[0, 0]] * 4))
    with pytest.raises(InputError, match=r"zeros\.json"):
        run_family(deep_run(), [parse(f"headkv:kept=0.3,window=2,file={file}")])


@pytest.mark.parametrize(
    "text", ["h2o:every=2", "adakv:window=1", "tova", "redundancy:round_tokens=4"]
)
def test_a_single_kv_head_and_a_single_token_kept_are_run(text: str) -> None:
    run = deep_run("llama one kv head")
    pruned, hidden_BRE = run_family(run, family(text, ["1tok", "0.01", "0.5"]))
    assert hidden_BRE.isfinite().all()
    for entries in pruned.entries.values():
        assert entries.held_NLGR.shape[2] == 1
        assert (entries.held_NLGR >= 1).all()


@pytest.mark.parametrize("num_rows", [2, 3])
def test_the_shortest_sequences_are_run(num_rows: int) -> None:
    loaded = tiny_model("llama")
    run = full_run(loaded, random_ids(num_rows))
    pruned, hidden_BRE = run_family(
        run, family("h2o", ["0.1", "1.0"]), setting_of(run, spans_of(run, 1))
    )
    assert hidden_BRE.shape[:2] == (2, num_rows - 1)
    assert (pruned.entries[1].held_NLGR[..., 0] == 2).all()
