"""What differs between transformers releases, from 5.8 on, and how they are kept quiet."""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.utils import logging as transformers_logging

from tracekit.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the cache in calls and outputs: since 5.24, before, and before in Mamba."""


def cache_keyword(model: Any) -> str:
    """Return the keyword under which the model's ``forward`` takes a cache.

    Raises
    ------
    ModelError
        If it takes none.
    """
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name in CACHE_NAMES if name in parameters]
    if not names:
        msg = f"{type(model).__name__} runs without a cache, so there is none to record; use another model."
        raise ModelError(msg)
    return names[0]


def new_cache(model: Any) -> Any:
    """Return an empty cache; the config makes sliding layers drop what left their window."""
    return DynamicCache(config=model.config)


def cache_of(output: Any) -> Any | None:
    """Return the cache in a model's output, or None."""
    names = set(output.keys())
    return next((output[name] for name in CACHE_NAMES if name in names), None)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep transformers' log back: it repeats in the midst of a progress bar what we have said."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers while it loads: its log, its warnings and its progress bars.

    The bar of the GGUF conversion is a plain tqdm that no switch reaches, so standard error is
    kept back as well; errors are raised, not printed, and so are not lost.
    """
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with muted(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        if has_bars:
            transformers_logging.enable_progress_bar()
