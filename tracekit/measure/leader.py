"""Leader clustering: vectors that come one by one join the nearest cluster or begin a new one."""

from __future__ import annotations

from typing import final

import numpy as np


@final
class Leaders:
    """Clusters of the vectors seen so far, by their direction from the mean of all of them.

    Leader clustering (Hartigan 1975, Clustering Algorithms, chapter 3) with running means in place
    of the leaders. With m the mean of all vectors so far, the new one x included, and c_j the mean
    of a cluster, x joins the cluster of the largest cosine of c_j - m and x - m if that is at least
    the threshold (ties: the older cluster), else it begins a cluster of its own. The n-th member
    moves its cluster's mean by max(1 / n, decay) of the way to itself.

    Parameters
    ----------
    size
        E, numbers of a vector.
    threshold
        Least cosine at which a vector joins.
    decay
        Least weight of a new member: 0 keeps the plain mean, 1 the newest member alone.
    """

    def __init__(self, size: int, *, threshold: float, decay: float) -> None:
        self._threshold, self._decay = threshold, decay
        self._centre_E = np.zeros(size)
        self._num_seen = 0
        self._num_clusters = 0
        # Longer than needed: it doubles when it is full.
        self._mean_JE = np.zeros((16, size))
        self._num_members_J = np.zeros(16, dtype=np.int64)

    @property
    def num_clusters(self) -> int:
        """Clusters so far."""
        return self._num_clusters

    def nearest(self, vector_E: np.ndarray) -> np.ndarray:
        """Return the mean of the cluster nearest to a vector that is not taken in.

        The nearest is that of the largest cosine of c_j - m and x - m, m the mean of the vectors so
        far without x; ties go to the older cluster, and there is no threshold.

        Parameters
        ----------
        vector_E
            float64 [E].

        Returns
        -------
        ndarray
            float64 [E], a copy; NaN before the first vector.
        """
        if not self._num_clusters:
            return np.full_like(self._centre_E, np.nan)
        mean_E: np.ndarray = self._mean_JE[self._cosines(vector_E).argmax()].copy()
        return mean_E

    def join(self, vector_E: np.ndarray) -> np.ndarray:
        """Take in a vector and return the mean of the cluster that it is now in.

        Parameters
        ----------
        vector_E
            float64 [E].

        Returns
        -------
        ndarray
            float64 [E], a copy.
        """
        self._num_seen += 1
        self._centre_E += (vector_E - self._centre_E) / self._num_seen
        cluster = self._joined(vector_E)
        self._num_members_J[cluster] += 1
        weight = max(1 / self._num_members_J[cluster], self._decay)
        self._mean_JE[cluster] += weight * (vector_E - self._mean_JE[cluster])
        mean_E: np.ndarray = self._mean_JE[cluster].copy()
        return mean_E

    def _joined(self, vector_E: np.ndarray) -> int:
        """Return the cluster that a vector joins, a new one if need be."""
        cosine_J = self._cosines(vector_E)
        if self._num_clusters and cosine_J.max() >= self._threshold:
            return int(cosine_J.argmax())
        return self._begun()

    def _cosines(self, vector_E: np.ndarray) -> np.ndarray:
        """Return the cosine of each cluster's mean and a vector, both seen from the centre."""
        toward_E = vector_E - self._centre_E
        toward_JE = self._mean_JE[: self._num_clusters] - self._centre_E
        length_J = np.sqrt(np.einsum("je,je->j", toward_JE, toward_JE) * (toward_E @ toward_E))
        # What lies on the centre has no direction and belongs to any.
        cosine_J = np.ones(self._num_clusters)
        np.divide(toward_JE @ toward_E, length_J, out=cosine_J, where=length_J > 0)
        return cosine_J

    def _begun(self) -> int:
        """Return a new cluster, still empty."""
        if self._num_clusters == len(self._mean_JE):
            self._mean_JE = np.concatenate([self._mean_JE, np.zeros_like(self._mean_JE)])
            self._num_members_J = np.concatenate(
                [self._num_members_J, np.zeros_like(self._num_members_J)]
            )
        self._num_clusters += 1
        return self._num_clusters - 1
