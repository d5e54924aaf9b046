"""A trace as candidate sets see it: attention as the model computes it, and each token scored once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from tests import tiny
from tracekit.errors import InputError
from tracekit.model.load import LoadedModel
from tracekit.model.read_spec import read_spec
from tracekit.record.options import RecordOptions
from tracekit.record.recorder import record
from tracekit.record.sources.text import TextSource
from tracekit.simulate.corpus import read_corpus, read_sequence
from tracekit.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "the sun on the river and in the morning the garden is another one " * 3


def texts(tmp_path: Path, source: dict[str, Any], model: Any, **options: Any) -> Trace:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    loaded = LoadedModel(
        model=model, tokenizer=tiny.tokenizer(), spec=read_spec(model, name="tiny", num_tokens=272)
    )
    record(
        loaded,
        TextSource(tmp_path / "a.txt", **source),
        tmp_path / "t",
        RecordOptions(**options),
    )
    return Trace(tmp_path / "t")


def test_attention_of_rows_is_the_models_own_in_a_sliding_layer(tmp_path: Path) -> None:
    model = tiny.model("mistral", sliding_window=5, attn_implementation="eager")
    trace = texts(tmp_path, {}, model)
    assert {one.window for one in trace.spec.layers} == {5}
    (text,) = read_corpus(trace).texts
    recorded = read_sequence(trace, text, cast("Any", None))
    rows_S = torch.tensor([0, 3, 5, 17, 30])
    with torch.no_grad():
        own = model(text.token_ids_T[None], output_attentions=True).attentions
    for layer, weight_BHTT in enumerate(own):
        found_HSK = recorded.attention(layer, rows_S)
        torch.testing.assert_close(found_HSK, weight_BHTT[0][:, rows_S, :31], atol=1e-5, rtol=0)


def test_windows_that_overlap_score_each_token_once(tmp_path: Path) -> None:
    trace = texts(tmp_path, {"window": 32, "stride": 20}, tiny.model(), capture="hidden")
    corpus = read_corpus(trace)
    assert len(corpus.texts) > 2
    assert len({one.prompt_id for one in corpus.texts}) == 1
    num_tokens = len(tiny.tokenizer()(TEXT).input_ids)
    scored = [len(one.scored_S) for one in corpus.texts]
    assert scored[:2] == [31, 20]
    assert sum(scored) == num_tokens - 1


def test_states_that_are_no_numbers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = texts(tmp_path, {}, tiny.model())
    (text,) = read_corpus(trace).texts
    blocks = trace.attention_inputs(text.sequence_id, 1)
    blocks["query"].data[:, -1] = float("nan")
    monkeypatch.setattr(Trace, "attention_inputs", lambda *_: blocks)
    recorded = read_sequence(trace, text, cast("Any", None))
    with pytest.raises(
        InputError, match=r"the query states of layer 1 of a\.txt.* NaN or infinity"
    ):
        recorded.attention(1, torch.tensor([2]))
