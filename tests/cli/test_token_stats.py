"""The statistics of next tokens as text."""

from __future__ import annotations

from tests.measure.test_token_stats import ORDER, random_rows
from tracekit.cli.token_stats import token_stats_text
from tracekit.measure.token_errors import SequenceBootstrap, TokenGaussian
from tracekit.measure.token_stats import Statistic, exact_match, token_statistics

TITLE = "level propagated, convention tracekit, 4 sequences, 200 tokens, seed 0"
BY_TOKENS, BY_SEQUENCES = "\N{PLUS-MINUS SIGN}", "interval"


def test_all_statistics_stand_in_llama_cpps_order_within_100_columns() -> None:
    sequences = random_rows([50, 60, 40, 50])
    marks = [rows.hit_full for rows in sequences]
    for errors, shown, hidden in (
        (SequenceBootstrap(seed=0), BY_SEQUENCES, BY_TOKENS),
        (TokenGaussian(), BY_TOKENS, BY_SEQUENCES),
    ):
        found = token_statistics(sequences, errors) + exact_match(sequences, marks, errors)
        text = token_stats_text(TITLE, found)
        lines = text.splitlines()
        assert lines[0] == TITLE
        assert max(map(len, lines)) <= 100
        assert shown in text
        assert hidden not in text
        labels = ["PPL(pruned)", "PPL(full)", "Cor(", "ln(PPL", "Mean    KLD", "Maximum KLD"]
        labels += ["99.9%   KLD", "Median  KLD", "0.1%    KLD", "Minimum KLD", "Mean    \u0394p"]
        labels += [
            "75.0%   \u0394p",
            "Minimum \u0394p",
            "RMS \u0394p",
            "Same top p",
            "Mean JSD",
            "Flips",
        ]
        places = [text.index(label) for label in labels]
        assert places == sorted(places)
        assert sum(line.startswith(" ") for line in lines) == len(ORDER) + 2 + 2 * 4


def test_null_is_a_dash_and_a_small_number_keeps_its_magnitude() -> None:
    found = [Statistic("kl_mean", "nats", 3.2e-9, None), Statistic("kl_max", "nats", None)]
    first, second = (line for line in token_stats_text(TITLE, found).splitlines() if "KLD" in line)
    assert first.split()[-1] == "3.20e-09"
    assert second.split()[-1] == "-"
