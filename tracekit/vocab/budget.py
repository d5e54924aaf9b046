"""The sizes that a scheme asks for at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tracekit.vocab.controller import fit_scale, weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.vocab.controller import Controller
    from tracekit.vocab.others import Others, Text
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Sequence as Recorded

ASKED, OTHERS, OWN = "asked", "others", "own"
"""How sizes come about: as asked; with a controller, so that their mean over steps of other prompts
is the size asked (a method), or over the sequence's own steps (a fair comparison with a fixed set of
that size, which no decoder can make)."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A scheme with its sizes.

    Parameters
    ----------
    scheme
        Who asks.
    fit
        One of ``ASKED``, ``OTHERS``, ``OWN``.
    size_SN
        Size of each step's set, beside the pinned tokens, for N sizes asked, int64.
    """

    scheme: Scheme
    fit: str
    size_SN: torch.Tensor


def asked(
    scheme: Scheme, sizes: Sequence[int], recorded: Recorded, others: Others
) -> Iterator[Asked]:
    """Yield a scheme with its sizes: once if they are fixed, else once a fit.

    Parameters
    ----------
    scheme
        The scheme.
    sizes
        Sizes asked.
    recorded
        The sequence; one scored step at least.
    others
        Texts of other prompts. Without any there is no fit on them.
    """
    controller = scheme.controller
    if not controller.adapts:
        size_N = torch.tensor(list(sizes))
        yield Asked(scheme, ASKED, size_N.expand(len(recorded.scored_S), -1))
        return
    weight_S = weights(controller, *recorded.runs())
    fits = {OWN: weight_S}
    if parts := [_weights_of(controller, text, others) for text in others.texts]:
        fits = {OTHERS: np.concatenate(parts), **fits}
    for fit, weight_X in fits.items():
        if len(weight_X):
            columns = [fit_scale(size, weight_X).sizes(weight_S) for size in sizes]
            yield Asked(scheme, fit, torch.from_numpy(np.stack(columns, 1)))


def _weights_of(controller: Controller, text: Text, others: Others) -> np.ndarray:
    """Return the weights of another prompt's steps: they hang on nothing else, so once a trace."""
    key = ("weights", controller.text, text.sequence_id)
    return others.corpus.memo.get(key, lambda: weights(controller, *text.runs()))
