"""What a scheme of candidate sets is called in every table. Needs no torch: reports ask it too."""

from __future__ import annotations

from tracekit.schema import ASKED, DECODED_FITS


def scheme_name(estimator: str, controller: str, fit: str = ASKED) -> str:
    """Return what an estimator with a controller is called: its text, and how sizes were fitted."""
    control = controller.removeprefix("fixed").removeprefix("@")
    fitted = "" if fit in DECODED_FITS else f" fit={fit}"
    return f"{estimator}@{control}{fitted}" if control else estimator
