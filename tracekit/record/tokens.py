"""The tokens of one sequence with their places, as the sequence grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracekit.record.rendered import Rendered


@dataclass
class Tokens:
    """The tokens of one sequence, as it grows."""

    ids: list[int] = field(default_factory=list)
    roles: list[str | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_generated: list[bool] = field(default_factory=list)
    is_template: list[bool] = field(default_factory=list)
    spans: list[str | None] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)

    def add_prompt(self, part: Rendered, stop_ids: set[int]) -> None:
        """Append a part of the prompt.

        An answer that ended by itself has written the first token of the next part already (the
        end of its turn); it is not written twice.
        """
        ended = bool(self.ids) and self.ids[-1] in stop_ids and self.ids[-1] == part.ids[0]
        known = int(ended)
        offset = len(self.ids) - known
        # The first end of a later part closes the answer before it.
        self.turn_ends = self.turn_ends[:-1] + [offset + end for end in part.turn_ends]
        self.ids += part.ids[known:]
        self.roles += part.roles[known:]
        self.turns += part.turns[known:]
        self.is_template += part.is_template[known:]
        self.spans += part.spans[known:]
        self.is_generated += [False] * (len(part.ids) - known)

    def add_answer(self, new: list[int], part: Rendered) -> None:
        """Append what the model made after a part of the prompt."""
        count = len(new)
        self.ids += new
        self.roles += ["assistant" if part.roles[-1] is not None else None] * count
        self.turns += [part.answer_turn] * count
        self.is_template += [False] * count
        self.spans += [None] * count
        self.is_generated += [True] * count
        self.turn_ends.append(len(self.ids))

    def answers(self) -> list[list[int]]:
        """Return the ids of each answer, in order."""
        made: dict[int, list[int]] = {}
        for token, turn, own in zip(self.ids, self.turns, self.is_generated, strict=True):
            if own:
                made.setdefault(turn, []).append(token)
        return list(made.values())

    def columns(self) -> dict[str, Any]:
        """Return the columns of ``schema.TOKENS``."""
        return {
            "position": list(range(len(self.ids))),
            "token_id": self.ids,
            "turn": self.turns,
            "role": self.roles,
            "is_generated": self.is_generated,
            "is_template": self.is_template,
            "span": self.spans,
        }
