"""``tracekit list``."""

from __future__ import annotations

from typing import Annotated

import typer


def list_(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """List policies and their parts, estimators, built-in models and prompt sets."""
    from tracekit.cli.output import emit, table
    from tracekit.kv.budget import HEAD_BUDGETS, LAYER_BUDGETS
    from tracekit.kv.parse import parse
    from tracekit.kv.presets import PRESETS
    from tracekit.kv.selector import SELECTORS
    from tracekit.kv.transform import TRANSFORMS
    from tracekit.model.builtin import BUILTIN_MODELS
    from tracekit.record.prompts import builtin_folder
    from tracekit.vocab.check import CHECKS
    from tracekit.vocab.controller import CONTROLLERS
    from tracekit.vocab.estimator import ESTIMATORS

    policies = [
        {"name": name, "text": parse(name).text, "what": PRESETS.get(name).preset.what}
        for name in PRESETS.names()
    ]
    for row in policies:
        row["what"] = row["what"] or _summary(PRESETS.get(row["name"]).scorer)
    estimators = [
        {"name": name, "text": ESTIMATORS.get(name)().text, "what": _summary(ESTIMATORS.get(name))}
        for name in ESTIMATORS.names()
    ]
    followers = [
        {
            "kind": registry.kind,
            "name": name,
            "text": registry.get(name)().text,
            "what": _summary(registry.get(name)),
        }
        for registry in (CONTROLLERS, CHECKS)
        for name in registry.names()
    ]
    parts_of_policies = [
        {"kind": registry.kind, "name": name, "what": _summary(registry.get(name))}
        for registry in (LAYER_BUDGETS, HEAD_BUDGETS, TRANSFORMS, SELECTORS)
        for name in registry.names()
    ]
    models = sorted(BUILTIN_MODELS)
    prompts = sorted(path.stem for path in builtin_folder().glob("*.jsonl"))
    parts = [
        table(
            title,
            ["name", "what it does", "in full"],
            [[r["name"], r["what"], r["text"]] for r in rows],
        )
        for title, rows in (("KV policies", policies), ("vocabulary estimators", estimators))
    ]
    parts.append(
        table(
            "parts of KV policies: layers=NAME, heads=NAME, +TRANSFORM, +SELECTOR",
            ["kind", "name", "what it does"],
            [[r["kind"], r["name"], r["what"]] for r in parts_of_policies],
        )
    )
    parts.append(
        table(
            "after an estimator: ESTIMATOR+ESTIMATOR@CONTROLLER@CHECK",
            ["kind", "name", "what it does", "in full"],
            [[r["kind"], r["name"], r["what"], r["text"]] for r in followers],
        )
    )
    parts += [f"models: {', '.join(models)}", f"prompt sets: {', '.join(prompts)}"]
    data = {
        "policies": policies,
        "parts": parts_of_policies,
        "estimators": estimators,
        "controllers_and_checks": followers,
        "models": models,
        "prompts": prompts,
    }
    emit(data, "\n".join(parts), as_json=as_json)


def _summary(cls: type) -> str:
    """Return the first sentence of a class's docstring."""
    text = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".").replace("``", "")
