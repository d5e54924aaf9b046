"""The sizes that a scheme asks for at each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tracekit.schema import ASKED, OTHERS, OWN, SHUFFLED
from tracekit.vocab.controller import fit_scale, weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tracekit.vocab.controller import Controller
    from tracekit.vocab.others import Others, Text
    from tracekit.vocab.scheme import Scheme
    from tracekit.vocab.view import Sequence as Recorded


@dataclass(frozen=True, eq=False)
class Asked:
    """A scheme with its sizes.

    Parameters
    ----------
    scheme
        Who asks.
    fit
        One of ``schema.ASKED``, ``OTHERS``, ``OWN``, ``SHUFFLED``.
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
    parts = [_weights_of(controller, text, others) for text in others.texts]
    weight_X = np.concatenate([np.empty(0), *parts])
    if len(weight_X):
        yield Asked(scheme, OTHERS, _sizes(sizes, weight_X, weight_S))
    size_SN = _sizes(sizes, weight_S, weight_S)
    yield Asked(scheme, OWN, size_SN)
    order_S = torch.randperm(len(size_SN), generator=torch.Generator().manual_seed(len(size_SN)))
    yield Asked(scheme, SHUFFLED, size_SN[order_S])


def _sizes(sizes: Sequence[int], weight_X: np.ndarray, weight_S: np.ndarray) -> torch.Tensor:
    """Return sizes whose means over some steps are those asked, [S, N]."""
    columns = [fit_scale(size, weight_X).sizes(weight_S) for size in sizes]
    return torch.from_numpy(np.stack(columns, 1))


def _weights_of(controller: Controller, text: Text, others: Others) -> np.ndarray:
    """Return the weights of another prompt's steps: they hang on nothing else, so once a trace."""
    key = ("weights", controller.text, text.sequence_id)
    return others.corpus.memo.get(key, lambda: weights(controller, *text.runs()))
