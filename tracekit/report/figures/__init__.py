"""One figure a file; the only rooms that import matplotlib. Nothing here uses pyplot's state."""

from __future__ import annotations
