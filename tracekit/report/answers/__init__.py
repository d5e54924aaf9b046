"""The answers that a report opens with."""

from tracekit.report.answers.answer import Answer
from tracekit.report.answers.cache import kv_answer
from tracekit.report.answers.layers import layer_answer
from tracekit.report.answers.logits import vocab_answer

__all__ = ["Answer", "kv_answer", "layer_answer", "vocab_answer"]
