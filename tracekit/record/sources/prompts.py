"""Sequences from prompts: the model answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from tracekit.errors import InputError
from tracekit.record.encode import accept_tokenizer
from tracekit.record.job import Job, Skipped
from tracekit.record.render import render
from tracekit.record.rendering import DEFAULT_RENDERING, Rendering
from tracekit.record.source import Source, accept_count, source_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracekit.record.prompts import PromptFile


@final
class PromptSource(Source):
    """Sequences from prompts: the model answers each of them ``samples`` times.

    Parameters
    ----------
    file
        What ``read_prompts`` gives.
    rendering
        Chat template or not, special tokens in messages or not.
    samples
        Sequences a prompt; their ids are ``story-01#0``, ``story-01#1`` ...
    limit
        The first so many prompts only.

    Raises
    ------
    UsageError
        If a number is below 1.
    """

    def __init__(
        self,
        file: PromptFile,
        rendering: Rendering = DEFAULT_RENDERING,
        samples: int = 1,
        limit: int | None = None,
    ) -> None:
        accept_count("samples", samples)
        accept_count("limit", limit)
        self.name, self.sha256, self.bad = file.name, file.sha256, file.bad
        self._prompts = file.prompts[:limit]
        self._rendering = rendering
        self._samples = samples

    def settings(self) -> dict[str, Any]:
        """Return what decides which sequences there are."""
        return source_settings("prompts", self._rendering, samples=self._samples)

    def count(self, tokenizer: Any) -> int:
        """Return how many sequences there are."""
        return len(self._prompts) * self._samples

    def jobs(self, tokenizer: Any) -> Iterator[Job | Skipped]:
        """Yield the samples of one prompt after the other, each prompt rendered once."""
        accept_tokenizer(tokenizer)
        self._rendering.accept(tokenizer)
        for prompt in self._prompts:
            try:
                parts = tuple(render(prompt, tokenizer, self._rendering))
            except InputError as error:
                yield Skipped(prompt.id, str(error))
                continue
            for sample in range(self._samples):
                yield Job(
                    sequence_id=f"{prompt.id}#{sample}",
                    prompt_id=prompt.id,
                    domain=prompt.domain,
                    sample=sample,
                    parts=parts,
                    max_new_tokens=prompt.max_new_tokens,
                    check=prompt.check,
                    prompt=prompt,
                    prompt_end=len(parts[0].ids),
                    rendering=self._rendering,
                )
