"""Each key finds its own finished requests, and no key makes the server forget another's."""

from __future__ import annotations

from twostroke.server.kept import ExplainedRequest, KeptRequests


def finished(name: str) -> ExplainedRequest:
    return ExplainedRequest(name, 0, "small", [])


def test_what_is_kept_is_found_by_its_key_alone() -> None:
    kept = KeptRequests()
    kept.keep(0, finished("a"))
    kept.keep(1, finished("b"))
    assert kept.find(0, "a") == kept.find(0, "last") == finished("a")
    assert kept.find(1, "a") is None and kept.find(2, "last") is None
    assert [request.id for request in kept.latest(1)] == ["b"]


def test_a_busy_key_forgets_its_own_oldest_and_nobody_elses() -> None:
    kept = KeptRequests(limit=10)
    for number in range(3):
        kept.keep(1, finished(f"quiet{number}"))
    for number in range(1000):
        kept.keep(0, finished(f"busy{number}"))
    assert [request.id for request in kept.latest(1)] == ["quiet2", "quiet1", "quiet0"]
    assert [request.id for request in kept.latest(0)] == [f"busy{number}" for number in range(999, 992, -1)]
    kept.keep(0, finished("busy999"))  # the same again takes no room
    assert len(list(kept.latest(0))) == 7
