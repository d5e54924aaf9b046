"""Symptoms, each with a rule that fires on a measured quantity. A new rule is one function."""

from __future__ import annotations

from tracekit.report.diagnosis.budgets import BUDGET_RULES
from tracekit.report.diagnosis.logits import LOGIT_RULES
from tracekit.report.diagnosis.losses import LOSS_RULES
from tracekit.report.diagnosis.rule import Finding, Rule, rule
from tracekit.report.diagnosis.scores import SCORE_RULES
from tracekit.report.diagnosis.trust import TRUST_RULES

__all__ = ["RULES", "Finding", "Rule", "rule"]

RULES: tuple[Rule, ...] = (*BUDGET_RULES, *LOSS_RULES, *SCORE_RULES, *TRUST_RULES, *LOGIT_RULES)
"""In the order of the table."""
