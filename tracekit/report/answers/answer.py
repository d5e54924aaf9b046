"""An answer in sentences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer to one question.

    Parameters
    ----------
    question
        As a user asks it.
    verdict
        The answer in one or two sentences.
    findings
        What each further sentence is about, and the sentence.
    rule
        What was counted, over what.
    """

    question: str
    verdict: str
    findings: tuple[tuple[str, str], ...]
    rule: str
