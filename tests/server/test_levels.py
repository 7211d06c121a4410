"""Which class a request is served in: by its wish, by its key, and never better than its key may have."""

from __future__ import annotations

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.server.errors import ApiError, cannot_keep_promise
from twostroke.server.levels import LevelChoice, promises_no_more

LEVELS = ServiceLevels(
    (
        ServiceLevel("default", 2.0, 0.1),
        ServiceLevel("chat", 0.5, 0.05, weight=4.0),
        ServiceLevel("batch", None, None, weight=0.5),
        ServiceLevel("priority", 0.2, 0.05, weight=8.0),
    )
)
KEYS, NAMES = ("sk-alice", "sk-batch-1", "sk-nobody"), ("alice", "", "")
BOUND = {"alice": "chat", "sk-batch-*": "batch"}


def bound(**more: str) -> LevelChoice:
    return LevelChoice(LEVELS, BOUND | more, KEYS, NAMES)


def test_without_a_table_of_keys_anybody_may_have_any_class() -> None:
    choice = LevelChoice(LEVELS, None, KEYS, NAMES)
    for key in (-1, 0, 2):
        assert choice.choose(key, None) == choice.choose(key, "") == "default"
        assert [choice.choose(key, name) for name in LEVELS.names] == list(LEVELS.names)


def test_a_key_has_its_class_and_may_ask_for_those_that_promise_no_more() -> None:
    choice = bound()
    assert choice.allowed(0) == ("chat", "default", "batch")
    assert choice.allowed(1) == ("batch",)
    assert choice.allowed(2) == ("default", "batch")  # it is not named, while others are
    assert choice.allowed(-1) == ("default", "batch")
    assert choice.choose(0, None) == "chat" and choice.choose(0, "batch") == "batch"
    with pytest.raises(ApiError, match="'priority' is not for this API key, which may have chat, default, batch") as no:
        choice.choose(0, "priority")
    assert (no.value.status_code, no.value.param, no.value.code) == (403, "service_level", "service_level_not_allowed")
    with pytest.raises(ApiError, match="without a key"):
        choice.choose(-1, "chat")


def test_everybody_else_may_have_what_a_star_says() -> None:
    choice = bound(**{"*": "priority"})
    assert choice.allowed(2) == choice.allowed(-1) == ("priority", "default", "chat", "batch")
    assert choice.allowed(1) == ("batch",)  # the longer beginning says more


def test_an_unknown_class_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ApiError, match="must be one of default, chat, batch, priority, not 'gold'") as refused:
        LevelChoice(LEVELS).choose(-1, "gold")
    assert (refused.value.status_code, refused.value.param) == (400, "service_level")


@pytest.mark.parametrize(
    ("tier", "served"),
    [(None, "chat"), ("auto", "chat"), ("default", "chat"), ("batch", "batch"), ("flex", "chat"), ("priority", "chat")],
)
def test_a_tier_is_taken_where_a_class_has_its_name_and_the_key_may_have_it(tier: str | None, served: str) -> None:
    assert bound().choose(0, None, tier) == served
    assert bound().choose(0, "default", tier) == "default"  # the field that is ours says more


def test_what_promises_no_more() -> None:
    chat = ServiceLevel("chat", 0.5, 0.05)
    assert promises_no_more(ServiceLevel("a", 0.5, 0.05), chat)
    assert promises_no_more(ServiceLevel("a"), chat)
    for more in (
        ServiceLevel("a", 0.4, 0.05),
        ServiceLevel("a", 0.5, 0.04),
        ServiceLevel("a", 0.5, 0.05, weight=1.1),
        ServiceLevel("a", is_derived=True),
    ):
        assert not promises_no_more(more, chat)
    assert not promises_no_more(chat, ServiceLevel("a"))
    assert not promises_no_more(chat, ServiceLevel("a", is_derived=True))


def test_a_slip_in_a_keys_name_is_found_at_the_start_and_no_key_is_repeated() -> None:
    with pytest.raises(BadRequestError, match="bind a key 'alise', and no API key has that name"):
        bound(alise="chat")
    with pytest.raises(BadRequestError, match="bind a key 'sk-forgotten") as refused:
        bound(**{"sk-forgotten-secret": "chat"})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("seconds", "whole", "fine"), [(0.2, "1", "200"), (1.0, "1", "1000"), (3.0004, "4", "3001")])
def test_a_refusal_says_when_to_come_back_and_never_too_early(seconds: float, whole: str, fine: str) -> None:
    error = cannot_keep_promise("too late", seconds)
    assert error.status_code == 429 and error.code == "promise_cannot_be_kept"
    assert error.headers == {"Retry-After": whole, "retry-after-ms": fine}


def test_what_waiting_would_not_help_is_a_bad_request() -> None:
    error = cannot_keep_promise("never", float("inf"))
    assert error.status_code == 400 and error.code == "promise_cannot_be_kept" and not error.headers
