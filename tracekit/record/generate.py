"""Generation by the model's own ``generate``: a batch of sequences over one growing cache."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tracekit.errors import ModelError, UsageError
from tracekit.model.sampling import Choice
from tracekit.model.versions import cache_keyword, muted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.model.load import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How the next token is chosen.

    Parameters
    ----------
    temperature
        0 is greedy; otherwise tokens are drawn from the distribution at this temperature.
    top_k
        Keep the k most likely tokens; 0 keeps all.
    top_p
        Keep the smallest set with this probability; 1 keeps all.
    min_p
        Keep tokens with at least this share of the largest probability; 0 keeps all.
    repetition_penalty
        Divide (multiply, if negative) the logits of tokens that were there before; 1 does nothing.
        Applies to a greedy choice as well.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no sampler does."""
        if not (
            0 <= self.temperature < math.inf
            and self.top_k >= 0
            and 0 < self.top_p <= 1
            and 0 <= self.min_p <= 1
            and 0 < self.repetition_penalty < math.inf
        ):
            msg = (
                "a sampler needs temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1 and "
                f"repetition_penalty > 0, not {self}."
            )
            raise UsageError(msg)

    def to_json(self) -> dict[str, Any]:
        """Return the settings for the trace."""
        return asdict(self)


class Watcher(Protocol):
    """Who follows a generation token by token.

    Both methods get all ids so far [B, C], padding included, and the column of each sequence's last
    token as far as it is known: that token is not run, and rows from there on belong to nobody.
    """

    def begin(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn of the prompts before they are run."""

    def told(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Learn of a new token of each sequence."""


class Unwatched:
    """Nobody follows."""

    def begin(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Do nothing."""

    def told(self, ids_BC: torch.Tensor, stops: Sequence[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What one sequence of a batch asks for: its ids so far, its most new tokens, its seed."""

    ids: Sequence[int]
    max_new_tokens: int
    seed: int


class Ends:
    """A stopping criterion that knows where each sequence of a batch ends.

    Parameters
    ----------
    wishes
        What was asked for.
    pads
        Columns of padding before each sequence.
    stop_ids
        Tokens that end a sequence.
    watcher
        Told of each token.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        pads: Sequence[int],
        stop_ids: set[int],
        watcher: Watcher,
    ) -> None:
        self._stop_ids = stop_ids
        self._watcher = watcher
        # The last token that a sequence may have is not run through the model.
        self.last_columns = [
            pad + len(wish.ids) + wish.max_new_tokens - 1
            for wish, pad in zip(wishes, pads, strict=True)
        ]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return which sequences have ended, bool [B]."""
        column = input_ids.shape[1] - 1
        for b, token in enumerate(input_ids[:, -1].tolist()):
            if token in self._stop_ids and column < self.last_columns[b]:
                self.last_columns[b] = column
        self._watcher.told(input_ids, self.last_columns)
        done = [column >= last for last in self.last_columns]
        return torch.tensor(done, device=input_ids.device)


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
