"""The text of a policy: ``h2o:kept=0.3,every=16+int4``. ``parse.py`` reads it back."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, cast

from tracekit.kv.amounts import Amount, kept_text, part_text
from tracekit.kv.attached import attached_as
from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS
from tracekit.kv.presets import PRESETS
from tracekit.kv.selector import SELECTORS
from tracekit.kv.transform import TRANSFORMS

if TYPE_CHECKING:
    from tracekit.kv.policy import Policy

AMOUNTS = ("kept", "read")
"""Parameters in which policies of one family differ."""

NEUTRAL = {
    "grace": "0",
    "template": "scored",
    "layers": "uniform",
    "heads": "uniform",
    "positions": "original",
}
"""Parameters that are written only where they differ from this: parts that most policies lack."""


def canonical(policy: Policy) -> str:
    """Return the text with every parameter written, those of ``NEUTRAL`` where they say something."""
    kept = {} if policy.kept is None else {"kept": kept_text(policy.kept)}
    parts = [join(policy.name, kept | policy_items(policy))]
    return "+".join([*parts, *(join(name, items) for name, items in _attached(policy))])


def short(policy: Policy) -> str:
    """Return the name and what differs from its preset, amounts left out."""
    entry, scorer_items = PRESETS.get(policy.name), _items_of(policy.scorer)
    # Protection may follow the scorer's parameters: it is as usual if it follows them.
    budgets = default_items(type(policy.layers)) | default_items(type(policy.heads))
    usual = budgets | entry.items(scorer_items)
    usual |= {name: value for name, value in entry.items().items() if name in scorer_items}
    own = {k: v for k, v in policy_items(policy).items() if usual.get(k) != v}
    parts = [] if policy.name == "full" and _attached(policy) else [join(policy.name, own)]
    for name, items in _attached(policy):
        defaults = default_items(attached_as(name).part)
        different = {k: v for k, v in items.items() if defaults.get(k) != v and k not in AMOUNTS}
        parts.append(join(name, different))
    return "+".join(parts)


def policy_items(policy: Policy) -> dict[str, str]:
    """Return all parameters but the amount, as text, in their fixed order."""
    around = {
        "sinks": str(policy.protection.sinks),
        "recent": part_text(policy.protection.recent),
        "grace": str(policy.protection.grace),
        "template": policy.protection.template,
        "layers": LAYER_BUDGETS.name_of(type(policy.layers)),
        **_items_of(policy.layers),
        "heads": HEAD_BUDGETS.name_of(type(policy.heads)),
        **_items_of(policy.heads),
    }
    items = _items_of(policy.scorer) | around | policy.schedule.items
    items |= {"positions": policy.positions}
    usual = NEUTRAL | dict(PRESETS.get(policy.name).preset.items)
    return {
        name: value
        for name, value in items.items()
        if NEUTRAL.get(name) != value or usual[name] != value
    }


def default_items(cls: type) -> dict[str, str]:
    """Return the parameters of a part's class as text, at their defaults; None is left out."""
    pairs = ((one.name, one.default) for one in fields(cast("Any", cls)))
    return {
        name: _text(value) for name, value in pairs if value is not None and value is not MISSING
    }


def join(name: str, items: dict[str, str]) -> str:
    """Return ``name:a=1,b=2``."""
    parts = ",".join(f"{key}={value}" for key, value in items.items())
    return f"{name}:{parts}" if parts else name


def _attached(policy: Policy) -> list[tuple[str, dict[str, str]]]:
    """Return names and parameters of what the policy is stacked with."""
    attached = []
    if policy.transform is not None:
        name = TRANSFORMS.name_of(type(policy.transform))
        attached.append((name, _items_of(policy.transform)))
    if policy.selector is not None:
        name = SELECTORS.name_of(type(policy.selector))
        attached.append((name, _items_of(policy.selector)))
    if policy.tier is not None:
        attached.append(("tier", _items_of(policy.tier)))
    return attached


def _items_of(part: Any) -> dict[str, str]:
    pairs = ((one.name, getattr(part, one.name)) for one in fields(part))
    return {name: _text(value) for name, value in pairs if value is not None}


def _text(value: Any) -> str:
    return kept_text(value) if isinstance(value, Amount) else str(value)
