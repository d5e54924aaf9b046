"""What is tried: an estimator, what sets its size, and what checks it, as one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracekit.errors import UsageError
from tracekit.parameters import make, split
from tracekit.registry import unknown
from tracekit.vocab.check import CHECKS
from tracekit.vocab.controller import CONTROLLERS
from tracekit.vocab.controllers.fixed import Fixed
from tracekit.vocab.estimator import parse_estimator
from tracekit.vocab.union import Union

if TYPE_CHECKING:
    from tracekit.vocab.check import Check
    from tracekit.vocab.controller import Controller
    from tracekit.vocab.estimator import Estimator


@dataclass(frozen=True)
class Scheme:
    """An estimator with a controller and, if any, a check.

    Parameters
    ----------
    estimator, controller, check
        The parts.
    """

    estimator: Estimator
    controller: Controller
    check: Check | None = None

    @property
    def text(self) -> str:
        """Canonical text: ``lowrank:rank=64@rate:gain=4@fallback:confidence=0.5``."""
        return "@".join(part.text for part in self._parts)

    @property
    def short(self) -> str:
        """The same without what is so by default: ``lowrank@rate@fallback``."""
        return "@".join(part.short for part in self._parts)

    @property
    def _parts(self) -> list[Estimator | Controller | Check]:
        """What is not as it would be without a word."""
        parts: list[Estimator | Controller | Check] = [self.estimator]
        parts += [self.controller] if self.controller.adapts else []
        return parts if self.check is None else [*parts, self.check]

    @property
    def reads_others(self) -> bool:
        """Whether its numbers hang on what the trace holds of other prompts."""
        return self.controller.adapts or any(one.needs.others for one in self.estimator.parts)

    @property
    def is_open_loop(self) -> bool:
        """Whether it reads what the full head gave at earlier steps.

        A decoder that prunes at every step does not have that: it would have to go by its candidates'
        logits, and what they miss would be missed again.
        """
        reads = self.controller.adapts and self.controller.reads_head
        return reads or any(one.needs.previous for one in self.estimator.parts)

    @property
    def is_method(self) -> bool:
        """Whether a decoder could prune so at every step; all else is a bound."""
        return self.estimator.causal and not self.is_open_loop

    @property
    def control(self) -> str:
        """Text of what sets the sizes and falls back: ``fixed``, ``rate:gain=4``."""
        check = "" if self.check is None else f"@{self.check.text}"
        return self.controller.text + check


def parse_scheme(text: str) -> Scheme:
    """Return the scheme that a text names.

    Parameters
    ----------
    text
        Estimators with ``+`` between them, whose candidates are joined; then, each after an ``@``, a
        controller and a check: ``frequency+previous@rate:gain=2@fallback:confidence=0.6``.

    Raises
    ------
    UsageError
        If a name or a parameter does not exist, or there are two controllers or checks.
    """
    first, *rest = text.split("@")
    try:
        members = tuple(map(parse_estimator, first.split("+")))
        estimator = members[0] if len(members) == 1 else Union(members)
        controllers: list[Controller] = []
        checks: list[Check] = []
        for part in rest:
            name, _, items = part.strip().partition(":")
            if name in CONTROLLERS.names():
                controllers.append(make(CONTROLLERS.get(name), split(items)))
            elif name in CHECKS.names():
                checks.append(make(CHECKS.get(name), split(items)))
            else:
                known = [*CONTROLLERS.names(), *CHECKS.names()]
                raise UsageError(unknown("controller or check", name, known))
        if len(controllers) > 1 or len(checks) > 1:
            msg = "one controller and one check are enough."
            raise UsageError(msg)
    except UsageError as error:
        msg = f"estimator {text!r}: {error}"
        raise UsageError(msg) from error
    controller = controllers[0] if controllers else Fixed()
    return Scheme(estimator, controller, checks[0] if checks else None)
