"""A forked process has a copy of the engine and none of its threads: it is told so, at once, and harms nobody."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.engine.conftest import WAYS, MakeLLM

from twostroke import SamplingParams
from twostroke.core.errors import BackendError
from twostroke.engine.offline import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Hello"}]
REFUSED, SERVED = 7, 8

WAYS_TO_ASK: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate("Once", GREEDY),
    "chat": lambda llm: llm.chat(MESSAGES, GREEDY),
    "stream": lambda llm: list(llm.stream("Once", GREEDY)),
    "step": lambda llm: llm.engine.step(),
}


def in_child(ask: Callable[[], object]) -> int:
    """The exit code of a forked process that asks; it never comes back into the tests."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ask()
            code = SERVED
        except BackendError as error:
            code = REFUSED if "made before a fork" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.timeout(240)
def test_a_forked_process_is_refused_and_the_first_goes_on(make_llm: MakeLLM) -> None:
    llm = make_llm(WAYS["plain"])
    before = llm.chat(MESSAGES, GREEDY)[0]  # the template's process is there now
    for name, ask in WAYS_TO_ASK.items():
        assert in_child(lambda ask=ask: ask(llm)) == REFUSED, name
    assert in_child(llm.close) == SERVED
    assert llm.chat(MESSAGES, GREEDY)[0].token_ids == before.token_ids
