from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import pyarrow.parquet as pq

from tracekit.simulate.shown import SPECIAL, token_texts

if TYPE_CHECKING:
    from pathlib import Path


def test_special_tokens_are_told_from_words_that_spell_the_same() -> None:
    vocabulary = pd.DataFrame({"text": ["<s>", "<s>", " a"], "class": ["special", "other", "word"]})
    assert token_texts(vocabulary).tolist() == [f"{SPECIAL[0]}<s>{SPECIAL[1]}", "<s>", " a"]


def test_every_position_of_a_shown_sequence_has_its_text(results_folder: Path) -> None:
    shown = pq.read_table(results_folder / "shown.parquet").to_pandas()
    for _, rows in shown.groupby("sequence_id", observed=True, sort=False):
        assert rows["position"].tolist() == list(range(len(rows)))
        assert rows["entropy_nats"].isna().tolist() == [True] + [False] * (len(rows) - 1)
    marked = shown.loc[shown["text"].str.startswith(SPECIAL[0]), "text"]
    inside = {text.removeprefix(SPECIAL[0]).removesuffix(SPECIAL[1]) for text in marked}
    assert (
        {"<|im_start|>", "<|im_end|>"} <= inside <= {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    )
