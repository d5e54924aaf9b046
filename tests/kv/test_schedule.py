from __future__ import annotations

import pytest

from tracekit.errors import UsageError
from tracekit.kv.anchors import parse_anchor
from tracekit.kv.parse import parse
from tracekit.kv.schedule import Every, Once, Spans

CHAT = Spans(num_tokens=100, context_end=40, prompt_end=60, turn_ends=(60, 100))
PLAIN = Spans(num_tokens=101)


def once(text):
    return Once(parse_anchor(text))


@pytest.mark.parametrize(
    ("text", "chat", "plain"),
    [
        ("context", 40, None),
        ("prompt", 60, 50),
        ("30", 30, 30),
        ("0.29", 29, 29),
        ("100", None, 100),
    ],
)
def test_a_point_is_found_or_the_sequence_has_none(text, chat, plain):
    assert once(text).point(CHAT) == chat
    assert once(text).point(PLAIN) == plain


def test_a_point_has_a_token_before_it():
    assert once("0").point(CHAT) is None
    assert once("0.001").point(CHAT) is None


def test_a_single_token_has_no_point_and_a_point_beyond_the_end_is_none():
    for text in ("context", "prompt", "1", "0.5", "1.0"):
        assert once(text).point(Spans(num_tokens=1)) is None
    assert once("prompt").point(Spans(num_tokens=10, prompt_end=10)) is None
    assert once("prompt").point(Spans(num_tokens=10, prompt_end=0)) is None
    assert once("context").point(Spans(num_tokens=10, context_end=9)) == 9
    assert once("9999").point(CHAT) is None


def test_the_text_is_read_back():
    for text in ("context", "prompt", "30", "0.29", "1.0"):
        assert once(text).text == f"at={text}"
        assert once(once(text).start.text) == once(text)
    assert Every(parse_anchor("prompt"), 16).text == "every=16,from=prompt"


def test_decisions_start_at_the_point_and_a_row_follows_each():
    assert once("prompt").decisions(60, Spans(num_tokens=101)) == (60,)
    assert once("prompt").decisions(60, Spans(num_tokens=61)) == ()
    assert Every(parse_anchor("prompt"), 16).decisions(60, Spans(num_tokens=101)) == (60, 76, 92)
    assert Every(parse_anchor("prompt"), 20).decisions(60, Spans(num_tokens=101)) == (60, 80)
    assert Every(parse_anchor("prompt"), 1).decisions(1, Spans(num_tokens=5)) == (1, 2, 3)
    assert Every(parse_anchor("prompt"), 99).decisions(60, Spans(num_tokens=101)) == (60,)
    assert Every(parse_anchor("prompt"), 1).decisions(60, Spans(num_tokens=61)) == ()


@pytest.mark.parametrize(
    ("text", "chat", "plain"),
    [
        ("h2o", 60, 50),
        ("h2o:every=16", 60, 50),
        ("h2o:every=16,from=context", 40, None),
        ("h2o:every=16,from=30", 30, 30),
        ("h2o:from=0.25", 25, 25),
        ("snapkv", 60, 50),
        ("snapkv:at=context", 40, None),
    ],
)
def test_a_policy_starts_where_its_text_says(text, chat, plain):
    assert parse(text).schedule.point(CHAT) == chat
    assert parse(text).schedule.point(PLAIN) == plain


@pytest.mark.parametrize(
    ("text", "aware"),
    [("context", False), ("prompt", True), ("40", False), ("41", True), ("0.3", False)],
)
def test_a_question_lies_before_points_after_the_context(text, aware):
    assert once(text).query_aware(CHAT) is aware


def test_where_question_and_context_are_not_apart_the_question_ends_the_prompt():
    spans = Spans(num_tokens=100, prompt_end=60)
    assert once("prompt").query_aware(spans) is True
    assert once("59").query_aware(spans) is False


def test_plain_text_has_no_question():
    assert once("prompt").query_aware(PLAIN) is False


def test_a_policy_waits_until_it_has_seen_enough():
    policy = parse("h2o:every=8,above=70").schedule
    assert policy.point(CHAT) == 70
    assert policy.decisions(70, CHAT) == (70, 78, 86, 94)
    assert parse("h2o:every=8,above=40").schedule.point(CHAT) == 60
    assert parse("h2o:every=8,above=100").schedule.point(CHAT) is None
    waits = parse("h2o:every=8,from=context,above=50").schedule
    assert waits.query_aware(CHAT) is True


def test_each_turn_is_followed_by_a_decision_and_a_row_follows_each():
    turns = parse("knorm:at=turn").schedule
    spans = Spans(num_tokens=100, prompt_end=20, turn_ends=(20, 50, 98, 99, 100))
    assert turns.point(spans) == 20
    assert turns.decisions(20, spans) == (20, 50, 98)
    assert turns.point(Spans(num_tokens=100, prompt_end=20)) is None


def test_words_and_fractions_out_of_range_are_refused():
    for text in ("promt", "1.5", "-3", "nan", "0.0", ""):
        with pytest.raises(UsageError):
            parse_anchor(text)
    with pytest.raises(UsageError, match="every=0"):
        Every(parse_anchor("prompt"), 0)


def test_evicting_in_the_prompt_decides_after_each_of_its_chunks():
    spans = Spans(num_tokens=30, prompt_end=20)
    once = parse("snapkv:evict-prompt=8").schedule
    assert once.point(spans) == 20
    assert once.decisions(20, spans) == (8, 16, 20)
    often = parse("h2o:every=4,evict-prompt=10").schedule
    assert often.decisions(20, spans) == (10, 20, 24, 28)
    assert often.text == "every=4,from=prompt,evict-prompt=10"
    assert parse("snapkv:evict-prompt=25").schedule.decisions(20, spans) == (20,)


def test_a_chunk_of_the_prompt_is_part_of_a_policys_identity():
    policy = parse("snapkv:kept=0.5,evict-prompt=256")
    assert "evict-prompt=256" in policy.text
    assert "evict-prompt=256" in policy.family
    assert parse(policy.text) == policy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("snapkv:evict-prompt=0", "at least 1 token"),
        ("snapkv:evict-prompt=x", "no number of tokens"),
        ("cake:evict-prompt=8", "leave evict-prompt out"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(text, why):
    with pytest.raises(UsageError, match=why):
        parse(text)
