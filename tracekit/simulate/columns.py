"""What a family did to the attention output of a stack of layers, as columns of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tracekit import schema
from tracekit.simulate.accounts import Accounts, Columns, mean_of, with_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tracekit.kv.policy import Policy
    from tracekit.kv.replay import Replay
    from tracekit.simulate.steps import Steps
    from tracekit.spec import LayerSpec

LOCAL = (
    "output_error",
    "output_cosine",
    "projected_error",
    "mass_kept",
    "attention_kl_nats",
    "topk_overlap",
    "oracle_overlap",
)
"""What is measured at level local alone; the other columns tell what was kept."""


class Stack(Accounts):
    """Accounts, and what is measured at level local.

    Parameters
    ----------
    policies, layers, point, needle_T, bytes_per_number
        As in ``Accounts``.
    result
        The replay, from the first row that counts on.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        layers: Sequence[LayerSpec],
        result: Replay,
        *,
        point: int,
        needle_T: np.ndarray,
        bytes_per_number: int,
    ) -> None:
        self.result = result
        super().__init__(
            policies,
            layers,
            result,
            point=point,
            needle_T=needle_T,
            bytes_per_number=bytes_per_number,
        )

    def _columns(self, steps: Steps) -> Columns:
        """Return all columns over some rows."""
        found = self.result.measures
        columns = super()._columns(steps)
        error, norm = (
            self._by_group(one)[..., steps.rows].sum((-2, -1))
            for one in (found.error_sq_NLHR, found.norm_sq_LHR[None])
        )
        columns["output_error"] = _relative(with_all(error, np.sum), with_all(norm, np.sum))
        columns["projected_error"] = self._projected(steps)
        means = {
            "output_cosine": found.cosine_NLHR,
            "mass_kept": found.mass_kept_NLHR,
            "attention_kl_nats": found.row_kl_NLHR,
        }
        for name, array in means.items():
            mean = self._by_group(array)[..., steps.rows].mean((-2, -1))
            columns[name] = with_all(mean, np.mean)
        columns["topk_overlap"] = with_all(mean_of(found.overlap_NLGR[..., steps.rows]), np.mean)
        overlap = with_all(self.result.oracle_overlap_NLG, np.mean)
        is_whole = steps.name == schema.ANY
        columns["oracle_overlap"] = overlap if is_whole else np.full(overlap.shape, np.nan)
        return columns

    def _projected(self, steps: Steps) -> np.ndarray:
        """Return the relative error after the output projection; a head's beside the layer's size."""
        found = self.result.measures
        error = found.projected_sq_NLXR[..., steps.rows].sum(-1)
        norm = found.projected_norm_sq_LXR[..., steps.rows].sum(-1)[None]
        if not error.shape[2]:
            return np.full((*error.shape[:2], self._layer.num_kv_heads + 1), np.nan)
        return _relative(error, norm)

    def _by_group(self, values_NLHR: np.ndarray) -> np.ndarray:
        """Return query-head values as [N, L, G, M, R], in float64."""
        shape = (*values_NLHR.shape[:2], self._layer.num_kv_heads, self._layer.group_size, -1)
        return np.asarray(values_NLHR, dtype=np.float64).reshape(shape)


def _relative(error_sq: np.ndarray, norm_sq: np.ndarray) -> np.ndarray:
    """Return sqrt(error / norm); where the full output is zero: 0 without an error, else null."""
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.sqrt(error_sq / norm_sq)
    return np.where(norm_sq > 0, relative, np.where(error_sq > 0, np.nan, 0.0))
