"""Schemes by their text: an estimator, a controller, a check."""

from __future__ import annotations

import pytest

from tracekit.errors import UsageError
from tracekit.vocab.checks.fallback import Fallback
from tracekit.vocab.controllers.fixed import Fixed
from tracekit.vocab.controllers.rate import Rate
from tracekit.vocab.estimators.frequency import Frequency
from tracekit.vocab.estimators.lowrank import LowRank
from tracekit.vocab.estimators.oracle import Oracle
from tracekit.vocab.estimators.previous import Previous
from tracekit.vocab.scheme import Scheme, parse_scheme
from tracekit.vocab.union import Union


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("oracle", Scheme(Oracle(), Fixed())),
        ("oracle@fixed", Scheme(Oracle(), Fixed())),
        ("lowrank:rank=3@rate", Scheme(LowRank(rank=3), Rate())),
        (" frequency @ rate:gain=2 ", Scheme(Frequency(), Rate(gain=2.0))),
        ("oracle@fallback:confidence=0.25", Scheme(Oracle(), Fixed(), Fallback(0.25))),
        ("oracle@fallback@rate", Scheme(Oracle(), Rate(), Fallback())),
        (
            "frequency+previous:top=3@rate@fallback",
            Scheme(Union((Frequency(), Previous(top=3))), Rate(), Fallback()),
        ),
    ],
)
def test_a_text_names_a_scheme_and_its_canonical_text_names_it_again(
    text: str, wanted: Scheme
) -> None:
    found = parse_scheme(text)
    assert found == wanted
    assert parse_scheme(found.text) == wanted
    assert parse_scheme(found.text).text == found.text


def test_the_canonical_text_leaves_out_what_does_nothing() -> None:
    assert parse_scheme("oracle@fixed").text == "oracle"
    scheme = parse_scheme("lowrank@fallback@rate:gain=2")
    rate, check = Rate(gain=2.0).text, "fallback:confidence=0.5"
    assert scheme.text == f"lowrank:rank=64@{rate}@{check}"
    assert scheme.control == f"{rate}@{check}"
    assert parse_scheme("oracle").control == "fixed"
    assert parse_scheme("oracle@fallback").control == f"fixed@{check}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "estimator '': unknown estimator ''"),
        ("oracle@", "unknown controller or check ''"),
        ("@rate", "unknown estimator ''"),
        ("oracle+", "unknown estimator ''"),
        ("oracel", "estimator 'oracel': unknown estimator 'oracel'; did you mean 'oracle'"),
        ("oracle+previuos", "did you mean 'previous'"),
        ("oracle@rtae", "unknown controller or check 'rtae'; did you mean 'rate'"),
        ("oracle@falback", "did you mean 'fallback'"),
        ("rate@oracle", "unknown estimator 'rate'"),
        ("oracle@rate@rate", "one controller and one check are enough"),
        ("oracle@fixed@rate", "one controller and one check are enough"),
        ("oracle@fallback@fallback", "one controller and one check are enough"),
        ("oracle@rate:gian=2", "unknown parameter 'gian'; did you mean 'gain'"),
        ("oracle@rate:gain=-2", "gain is a number from 0 on"),
        ("oracle@rate:gain=nan", "gain=nan is no number that can be used"),
        ("oracle@rate:gain=inf", "gain=inf is no number that can be used"),
        ("oracle@rate:window=2.5", "window='2.5' is no int"),
        ("oracle@rate:window=0", "window must be at least 1"),
        ("oracle@fallback:confidence=1.5", "confidence is a probability from 0 to 1"),
        ("lowrank:rank=0@rate", "rank must be at least 1"),
    ],
)
def test_a_wrong_text_is_refused_whole_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        parse_scheme(text)
    assert str(raised.value).startswith(f"estimator {text!r}: ")
