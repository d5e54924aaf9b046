"""Generation by the model's own ``generate``, one answer at a time over one growing cache."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from tracekit.errors import UsageError
from tracekit.model.versions import cache_keyword

if TYPE_CHECKING:
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
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what no sampler does."""
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            msg = f"a sampler needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, not {self}."
            raise UsageError(msg)

    def generation_config(self, model: Any, max_new_tokens: int) -> Any:
        """Return the model's generation config with this sampler in place of its own."""
        config = copy.deepcopy(model.generation_config)
        drawn = self.temperature > 0
        config.update(
            do_sample=drawn,
            temperature=self.temperature if drawn else None,
            top_k=self.top_k if drawn else None,
            top_p=self.top_p if drawn else None,
            max_new_tokens=max_new_tokens,
            max_length=None,
            num_beams=1,
            num_return_sequences=1,
            repetition_penalty=None,
            return_dict_in_generate=False,
            # A compiled decoding step would not call our hook.
            disable_compile=True,
        )
        return config

    def to_json(self) -> dict[str, Any]:
        """Return the settings for the trace."""
        return asdict(self)


def generate(
    loaded: LoadedModel,
    ids: list[int],
    cache: Any,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[int]:
    """Return the new ids that the model appends to ``ids``.

    Parameters
    ----------
    loaded
        Model and tokenizer.
    ids
        The whole sequence so far; what the cache already holds is not run again.
    cache
        A cache of the model's class, changed by generation.
    sampler
        How tokens are chosen.
    max_new_tokens
        At most so many.
    seed
        Of the sampler; the caller's random state is left as it was.
    """
    model = loaded.model
    input_ids = torch.tensor([ids], device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=sampler.generation_config(model, max_new_tokens),
            **{cache_keyword(model): cache},
        )
    new: list[int] = output[0, len(ids) :].tolist()
    return new


def stop_ids(model: Any) -> set[int]:
    """Return the ids that end a generation."""
    ids = model.generation_config.eos_token_id
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}
