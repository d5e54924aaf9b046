"""A press by the name of its class; these scripts run in kvpress's own environment."""

from __future__ import annotations

import kvpress


def make_press(wanted: dict, kept_frac: float) -> kvpress.BasePress:
    """Return a press that keeps so much of a prompt, inside another press where one is named.

    Parameters
    ----------
    wanted
        ``press``: name of the class; ``settings``: its parameters; ``around``: class of the press
        that wraps it, or an empty text.
    kept_frac
        Fraction to keep; kvpress itself counts what is removed.
    """
    press = getattr(kvpress, wanted["press"])(compression_ratio=1 - kept_frac, **wanted["settings"])
    return getattr(kvpress, wanted["around"])(press) if wanted["around"] else press
