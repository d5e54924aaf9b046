"""What the numbers do not say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekit.report.blocks import Items, Section

if TYPE_CHECKING:
    from tracekit.report.load import Results
    from tracekit.report.options import Options

_LIMITS = """\
A running model would feed each layer's error to the next and write other text. Level local has \
neither; predicted and propagated have the first, on the recorded tokens; text that changes is in \
none of them.
The kept fraction counts bytes over the scored steps, so a policy that evicts once and then lets the \
cache grow keeps more than it was asked to.
Bytes are those of the entries. Whether a device gets them back depends on its allocator and kernel.
Perplexity is told of given text alone: a model's own text is blind to what it would not write.
An oracle looks at the answer first: it bounds the others and cannot be built.
Delta bounds the procedure: the chance that anything wrong is certified, not the share of wrong ones \
among what was certified."""


def section(results: Results, options: Options) -> Section:
    """Return the limits."""
    del options
    num = len(results.run["sequences"])
    first = (
        f"The numbers hold for this model, these {num} sequences and these settings; intervals cover "
        "the choice of sequences, not of prompts that were never recorded."
    )
    items = tuple(("", text) for text in (first, *_LIMITS.splitlines()))
    return Section(name="limits", title="Limits", short="Limits", blocks=(Items(items=items),))
