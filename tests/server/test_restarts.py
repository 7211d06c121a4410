"""What callers are told to wait is what they have to wait."""

from __future__ import annotations

from twostroke.config import EngineConfig
from twostroke.server.client import EngineClient, EngineState
from twostroke.server.messages import EngineSettings
from twostroke.server.metrics import Metrics
from twostroke.server.restarts import LONGEST_BACK_OFF_S, STEADY_AFTER_S, Restarts


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_back_off_doubles_to_its_longest_and_callers_are_told_all_of_it() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    clock.now_s += 4.0
    restarts.ready()  # a start takes four seconds
    expected_s = 0.5
    for _ in range(8):
        clock.now_s += 1.0
        assert restarts.ended(is_hung=False) == expected_s
        assert expected_s + 4.0 <= restarts.retry_after_s <= expected_s + 5.0
        clock.now_s += expected_s
        restarts.starting()
        assert restarts.retry_after_s == 4
        clock.now_s += 4.0
        restarts.ready()
        expected_s = min(LONGEST_BACK_OFF_S, 2 * expected_s)
    assert expected_s == LONGEST_BACK_OFF_S
    clock.now_s += STEADY_AFTER_S
    assert restarts.ended(is_hung=True) == 0.5
    assert restarts.by_reason == {"died": 8, "hung": 1}


def test_a_start_that_takes_longer_than_the_last_is_worth_another_look_in_a_second() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    clock.now_s += 50.0
    assert restarts.retry_after_s == 1


def test_the_refusal_of_an_engine_that_waits_to_be_started_has_its_whole_back_off() -> None:
    client = EngineClient(EngineSettings("none", EngineConfig()), Metrics())
    client.state = EngineState.RESTARTING
    for _ in range(8):
        client.restarts.ended(is_hung=False)
    refusal = client.unavailable()
    assert refusal.status_code == 503 and refusal.headers is not None
    assert LONGEST_BACK_OFF_S <= int(refusal.headers["Retry-After"]) <= LONGEST_BACK_OFF_S + 2
    client.state = EngineState.STOPPED
    assert client.unavailable().message == "the server is stopping"
    assert client._ending().code == "server_stopping"
