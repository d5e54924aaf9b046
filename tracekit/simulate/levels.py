"""Questions about KV policies, one a level of truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tracekit.errors import ModelError
from tracekit.simulate.kv import replay_sequence
from tracekit.simulate.predicted import predict_sequence
from tracekit.simulate.question import (
    FAILS,
    Answers,
    Question,
    Tables,
    all_or_each,
    seed_of,
    sentence,
)
from tracekit.simulate.rerun import rerun
from tracekit.simulate.stacks import why_no_layer
from tracekit.simulate.through import run_through

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from tracekit.model.load import LoadedModel
    from tracekit.progress import Progress
    from tracekit.simulate.plan import Plan
    from tracekit.simulate.recorded_model import RecordedModel
    from tracekit.trace.reader import Trace

_NO_POINT = "the sequence has no such eviction point, or nothing to score after it"


class _KvQuestion(Question):
    """A question about KV policies: a cell is a family, all its amounts together."""

    def __init__(self, trace: Trace, plan: Plan, progress: Progress) -> None:
        self._trace, self._plan, self._progress = trace, plan, progress
        self._families = {
            f"{family[0].family}: {', '.join(policy.text for policy in family)}": family
            for family in plan.families
        }

    @property
    def cells(self) -> list[str]:
        """Families."""
        return list(self._families)

    @property
    def why_not(self) -> str:
        """No eviction point, or no layer."""
        return why_no_layer(self._trace) or _NO_POINT

    def content(self, cell: str) -> str:
        """Return the hash of the file of a family's budget."""
        return self._families[cell][0].layers.content

    def _seed(self, sequence: pd.Series[Any]) -> int:
        return seed_of(sequence, self._plan.seed)

    def _by_family(self, cells: Sequence[str], made: Mapping[str, Tables]) -> dict[str, Tables]:
        """Return cells put together of the tables of each policy, by its text."""
        parts = {
            cell: [made[one.text] for one in self._families[cell] if one.text in made]
            for cell in cells
        }
        return {
            cell: {name: pa.concat_tables([one[name] for one in some]) for name in self.tables}
            for cell, some in parts.items()
            if some
        }


class Local(_KvQuestion):
    """What eviction does to each layer's attention output, its inputs unchanged."""

    name = "local"
    tables = ("kv", "held")

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return families, computed together: they share most of the work."""

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            made = replay_sequence(
                self._trace,
                sequence,
                [self._families[cell] for cell in some],
                seed=self._seed(sequence),
                bytes_per_number=self._plan.bytes_per_number,
            )
            return self._by_family(some, made)

        return all_or_each(compute, cells)


class Predicted(_KvQuestion):
    """What recorded probes foretell of the next-token distributions."""

    name = "predicted"
    tables = ("kv",)

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return families; those of which nothing is foretold are named."""
        skipped: dict[str, str] = {}

        def compute(some: Sequence[str]) -> dict[str, Tables]:
            found = predict_sequence(
                self._trace,
                sequence,
                [self._families[cell] for cell in some],
                seed=self._seed(sequence),
                bytes_per_number=self._plan.bytes_per_number,
                block=self._plan.probe_block,
            )
            if found.note:
                self._progress.say(f"{sequence['sequence_id']}: {found.note}")
            for cell in some:
                text = self._families[cell][0].text
                if text in found.refused:
                    skipped[cell] = found.refused[text]
            return self._by_family(some, {text: {"kv": one} for text, one in found.tables.items()})

        answers = all_or_each(compute, cells)
        answers.skipped |= skipped
        return answers


class Propagated(_KvQuestion):
    """What eviction in all layers at once does to the next-token distributions."""

    name = "propagated"
    tables = ("kv", "logits")

    def __init__(self, trace: Trace, plan: Plan, progress: Progress, model: RecordedModel) -> None:
        super().__init__(trace, plan, progress)
        self._model = model

    def answer(self, sequence: pd.Series[Any], cells: Sequence[str]) -> Answers:
        """Return families; one that fails loses no other, a pass that fails loses this sequence.

        Raises
        ------
        InputError
            If the trace's model is not there.
        ModelError
            If it is another one, or eviction cannot be run inside it.
        """
        loaded, answers = self._model.loaded, Answers()
        try:
            self._fill(answers, loaded, sequence, cells)
        except ModelError:
            raise
        except FAILS as error:  # of the sequence's own pass, no family's
            there = answers.made.keys() | answers.failed.keys()
            answers.failed |= {cell: sentence(error) for cell in cells if cell not in there}
        return answers

    def _fill(
        self, answers: Answers, loaded: LoadedModel, sequence: pd.Series[Any], cells: Sequence[str]
    ) -> None:
        """Add families to answers; the sequence's own pass is run once."""
        families = {cell: self._families[cell] for cell in cells}
        again = rerun(
            self._trace,
            loaded,
            sequence,
            seed=self._seed(sequence),
            bytes_per_number=self._plan.bytes_per_number,
            probes=any(family[0].scorer.needs.influence for family in families.values()),
        )
        if again is None:
            return
        for cell, made in run_through(again, families, self._plan.inside.convention):
            try:
                answers.made[cell] = made()
            except FAILS as error:
                answers.failed[cell] = sentence(error)
