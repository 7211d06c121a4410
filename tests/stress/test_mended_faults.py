"""Faults that the harness found, made small, so that none comes back."""

from __future__ import annotations

from tests.stress.playing import play
from tests.stress.scenario import Abort, Arrive, Befall, Scenario, Setup, Turns
from tests.stress.trouble import Trouble

SETUP = Setup(
    block_size=2,
    groups=((None, 20),),
    num_states=None,
    config={"max_context": 20, "max_tokens_per_step": 24, "max_chunk_tokens": 1, "kv_watermark": 0.0},
    run_ahead=True,
    itl_target_s=None,
    max_drafts=0,
    colliding=False,
    has_text=False,
    tiers=None,
    policy="fifo",
    levels=(),
    predicts=None,
    slowness=1.0,
    seed=0,
)
SETUP.config["priority_aging_s"] = 0.0


def test_what_an_aborted_request_wrote_is_found_by_nobody_if_its_last_step_then_fails() -> None:
    sampling = {"max_tokens": 4, "seed": 0}
    first, second = Arrive((3, 28, 26, 13, 3), sampling), Arrive((3, 28, 5, 17, 14), sampling)
    fault = Befall(Trouble.NOT_FINITE)
    play(Scenario(SETUP, (first, Turns(2), fault, Turns(1), Abort(0), Turns(1), second, Turns(9))))
