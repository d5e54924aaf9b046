"""Maps of one pixel a cell: an even scale from dark to bright that colour-blind readers see as well."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.image import imsave

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COLORS = "cividis"


def pixels(share: NDArray[np.float64]) -> bytes:
    """Return shares of the colour scale, 0 to 1, as a PNG file; NaN is transparent.

    Parameters
    ----------
    share
        [rows, columns], the first row on top.
    """
    rgba = colormaps[_COLORS](np.ma.masked_invalid(share), bytes=True)
    rgba[np.isnan(share)] = 0
    file = io.BytesIO()
    imsave(file, rgba, format="png", metadata={"Software": "tracekit"})
    return file.getvalue()


def scale() -> bytes:
    """Return the colours from low to high as a PNG file of one row."""
    return pixels(np.linspace(0, 1, 64)[None, :])
