from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tracekit.errors import UsageError
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec
from tracekit.model.versions import new_cache
from tracekit.record.ends import Wish
from tracekit.record.generate import generate, padded
from tracekit.record.sampler import Sampler

PROMPTS = [[10, 11, 12, 13, 14, 15, 16], [40, 41], [77]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = tiny.model()
    spec = read_spec(model, name="tiny", num_tokens=272)
    return LoadedModel(model=model, tokenizer=tiny.tokenizer(), spec=spec)


def run(loaded: LoadedModel, wishes: list[Wish], sampler: Sampler, **how: Any) -> list[list[int]]:
    how = {"prefill_chunk": 2048, **how}
    return generate(loaded, wishes, new_cache(loaded.model), sampler, **how)


def wish(ids: list[int], seed: int = 0, new: int = 12) -> Wish:
    return Wish(ids=ids, max_new_tokens=new, seed=seed)


SAMPLERS = [
    Sampler(),
    Sampler(temperature=1.0),
    Sampler(temperature=0.7, top_k=20),
    Sampler(temperature=1.3, top_p=0.8),
    Sampler(temperature=1.3, min_p=0.02),
    Sampler(repetition_penalty=1.5),
    Sampler(temperature=0.9, repetition_penalty=1.2, top_k=50, top_p=0.95),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_one_sequence_draws_what_transformers_draws(loaded: LoadedModel, sampler: Sampler) -> None:
    ids = torch.tensor([PROMPTS[0]])
    torch.manual_seed(5)
    settings = {name: value or None for name, value in sampler.to_json().items()}
    if not sampler.temperature:
        settings = {"repetition_penalty": sampler.repetition_penalty}
    theirs = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=sampler.temperature > 0,
        max_new_tokens=12,
        **settings,
    )
    assert run(loaded, [wish(PROMPTS[0], 5)], sampler) == [theirs[0, ids.shape[1] :].tolist()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_neighbours_in_a_batch_change_no_token(loaded: LoadedModel, sampler: Sampler) -> None:
    wishes = [wish(ids, seed) for seed, ids in enumerate(PROMPTS)]
    alone = [run(loaded, [one], sampler)[0] for one in wishes]
    assert run(loaded, wishes, sampler) == alone


def test_each_sequence_has_its_own_limit(loaded: LoadedModel) -> None:
    wishes = [wish(ids, new=new) for ids, new in zip(PROMPTS, (3, 1, 7), strict=True)]
    assert [len(new) for new in run(loaded, wishes, Sampler())] == [3, 1, 7]


def test_the_callers_random_state_is_left_alone(loaded: LoadedModel) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    run(loaded, [wish(PROMPTS[0])], Sampler(temperature=1.0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_prompt_in_chunks_gives_the_tokens_of_generate_with_the_same_chunks(
    loaded: LoadedModel,
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    theirs = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=12,
        prefill_chunk_size=3,
    )
    ours = run(loaded, [wish(PROMPTS[0])], Sampler(), prefill_chunk=3)
    assert ours == [theirs[0, ids.shape[1] :].tolist()]


def test_a_batch_in_chunks_that_are_padding_alone_gives_the_same_tokens(
    loaded: LoadedModel,
) -> None:
    wishes = [wish(ids) for ids in PROMPTS]
    assert run(loaded, wishes, Sampler(), prefill_chunk=2) == run(loaded, wishes, Sampler())


def test_padding_stands_on_the_left() -> None:
    pads, ids, mask = padded(PROMPTS, 9, torch.device("cpu"))
    assert pads == [0, 5, 6]
    assert ids[2].tolist() == [9, 9, 9, 9, 9, 9, 77]
    assert mask.sum(1).tolist() == [7, 2, 1]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"top_k": -1}]
)
def test_a_sampler_that_nothing_does_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be"):
        Sampler(**wrong)


def test_padding_that_stands_for_a_token_is_not_penalised_as_repeated() -> None:
    model = tiny.model()
    spec = read_spec(model, name="tiny", num_tokens=272)
    loaded = LoadedModel(model=model, tokenizer=tiny.tokenizer(), spec=spec)
    sampler, short = Sampler(repetition_penalty=1.5), wish(PROMPTS[1])
    alone = run(loaded, [short], sampler)[0]
    # What the short one says first is what it is padded with.
    model.generation_config.pad_token_id = alone[0]
    assert run(loaded, [wish(PROMPTS[0]), short], sampler)[1] == alone
