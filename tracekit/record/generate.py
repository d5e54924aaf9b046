"""Generation by the model's own ``generate``: a batch of sequences over one growing cache."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import ModelError
from tracekit.model.sampling import Choice
from tracekit.model.versions import cache_keyword, muted
from tracekit.record.ends import Ends, Unwatched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.load import LoadedModel
    from tracekit.record.ends import Watcher, Wish
    from tracekit.record.sampler import Sampler


def generate(
    loaded: LoadedModel,
    wishes: Sequence[Wish],
    cache: Any,
    sampler: Sampler,
    *,
    prefill_chunk: int | None,
    watcher: Watcher | None = None,
) -> list[list[int]]:
    """Return the new ids that the model appends to each sequence.

    Parameters
    ----------
    loaded
        Model and tokenizer.
    wishes
        The sequences; shorter ones are padded on the left, at their true positions. What the cache
        already holds is not run again.
    cache
        A cache of the model's class, changed by generation.
    sampler
        How tokens are chosen.
    prefill_chunk
        Most tokens of a prompt that go through the model at once, into an empty cache; None: all.
        What follows an answer is one chunk.
    watcher
        Told of the prompts and of each token.

    Raises
    ------
    ModelError
        If the device's memory does not hold the batch.
    """
    model = loaded.model
    pads, input_ids, mask = padded([wish.ids for wish in wishes], _pad_id(model), model.device)
    watcher = watcher or Unwatched()
    ends = Ends(wishes, pads, stop_ids(model), watcher)
    watcher.begin(input_ids, ends.last_columns)
    choice = Choice(
        **sampler.to_json(),
        seeds=[wish.seed for wish in wishes],
        pads=pads,
        device=model.device,
    )
    most = max(wish.max_new_tokens for wish in wishes)
    width = input_ids.shape[1]
    try:
        with torch.no_grad(), muted():
            output = model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=plain_config(
                    model, most, prefill_chunk if width > (prefill_chunk or width) else None
                ),
                logits_processor=[choice],
                stopping_criteria=[ends],
                **{cache_keyword(model): cache},
            )
    except torch.OutOfMemoryError as error:
        msg = (
            f"{model.device} has no memory for {len(wishes)} sequences of {width} tokens and more; "
            "lower --batch-size or --prefill-chunk."
        )
        raise ModelError(msg) from error
    last = [min(end, output.shape[1] - 1) for end in ends.last_columns]
    return [output[b, width : end + 1].tolist() for b, end in enumerate(last)]


def padded(
    ids: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return columns of padding, ids [B, C] padded on the left, and their mask [B, C]."""
    width = max(len(one) for one in ids)
    pads = [width - len(one) for one in ids]
    rows = [[pad_id] * pad + list(one) for pad, one in zip(pads, ids, strict=True)]
    mask = torch.ones(len(ids), width, dtype=torch.int64, device=device)
    for b, pad in enumerate(pads):
        mask[b, :pad] = 0
    return pads, torch.tensor(rows, device=device), mask


def plain_config(model: Any, max_new_tokens: int, prefill_chunk: int | None) -> Any:
    """Return the model's generation config, greedy: what is drawn is drawn by ``Choice``."""
    config = copy.deepcopy(model.generation_config)
    config.update(
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        max_new_tokens=max_new_tokens,
        max_length=None,
        num_beams=1,
        num_return_sequences=1,
        pad_token_id=_pad_id(model),
        prefill_chunk_size=prefill_chunk,
        return_dict_in_generate=False,
        use_cache=True,
        # A compiled decoding step would not call our hook.
        disable_compile=True,
    )
    return config


def stop_ids(model: Any) -> set[int]:
    """Return the ids that end a generation."""
    ids = model.generation_config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


def _pad_id(model: Any) -> int:
    """Return an id for columns that no sequence has: the mask hides them, so any id does."""
    known = model.generation_config.pad_token_id
    return int(known if known is not None else min(stop_ids(model), default=0))
