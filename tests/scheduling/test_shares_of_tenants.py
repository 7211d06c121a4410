"""What tenants are promised of a real scheduler, on a virtual clock: while one has prompts that may be read, it gets no
less than its share of what is read, less one step's work. Shares are by the weights of the classes that the seconds
went to. Steps are as long as the token budget, or as short as a promised gap or a target makes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.scheduling.test_policies import SPEC, Played
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.core.step import Step

TOKEN_S = 1e-3
STEP_TOKENS = 100
"""The most that a step takes is a tenth of a second, and so is its work."""
STEP_S = TOKEN_S * STEP_TOKENS
TENANTS = "abcde"


@dataclass
class Account:
    """What one tenant was given, and the same over weights."""

    read_s: float = 0.0
    all_s: float = 0.0
    weighed_s: float = 0.0
    weights: set[float] = field(default_factory=set)

    @property
    def weight(self) -> float:
        """Of what it was given, on average."""
        return self.all_s / self.weighed_s if self.weighed_s else max(self.weights)

    @property
    def unevenness(self) -> float:
        return max(self.weights) / min(self.weights)


class Watched(Played):
    """Counts what the steps themselves hold, a token a millisecond."""

    def __init__(self, levels: ServiceLevels, itl_target_s: float | None = None) -> None:
        config = replace(SPEC.scheduler, max_tokens_per_step=STEP_TOKENS, max_running=STEP_TOKENS)
        super().__init__("fair", levels=levels, scheduler=config, itl_target_s=itl_target_s)
        self._weights = {level.name: level.weight for level in levels.levels}
        self.accounts: dict[str, Account] = {}
        self._by_id: dict[int, Sequence] = {}
        self.held: set[str] = set()
        """Who waited for streams to end when the last step was planned."""
        self._watch_admission()

    def _watch_admission(self) -> None:
        """A flow may wait for its own streams; whoever is held for the sake of gaps holds all behind it."""
        admission = self.replica.scheduler._admission
        may_begin, holds = admission._may_begin, admission.gaps.holds

        def begins(flow: str) -> bool:
            found = may_begin(flow)
            self.held |= set() if found else {flow}
            return found

        def is_held(newcomer: Sequence, *rest: Any) -> bool:
            found = holds(newcomer, *rest)
            begun = {one.request.tenant for one in admission.running if one.next_position < one.prompt_len}
            self.held |= set(self.accounts) - begun if found else set()
            return found

        admission._may_begin = begins  # type: ignore[method-assign]
        admission.gaps.holds = is_held  # type: ignore[method-assign]

    def add(self, arrival_s: float, num_tokens: int, level: str, tenant: str = "", answer: int = 1) -> Sequence:
        added = super().add(arrival_s, num_tokens, level, tenant, answer)
        self._by_id[added.seq_id] = added
        self.accounts.setdefault(tenant, Account()).weights.add(self._weights[level])
        return added

    def play_a_step(self) -> None:
        self.held.clear()
        launched: list[Step] = []
        schedule = self.replica.scheduler.schedule

        def seen(now_s: float) -> Step | None:
            step = schedule(now_s)
            launched.extend([] if step is None else [step])
            return step

        self.replica.scheduler.schedule = seen  # type: ignore[method-assign]
        self.replica.step()
        self.replica.scheduler.schedule = schedule  # type: ignore[method-assign]
        for step in launched:
            for chunk in step.prefills:
                self._give(chunk.seq_id, TOKEN_S * len(chunk.token_ids), is_read=True)
            for slot in step.decodes:
                self._give(slot.seq_id, TOKEN_S, is_read=False)

    def _give(self, seq_id: int, seconds: float, *, is_read: bool) -> None:
        request = self._by_id[seq_id].request
        account = self.accounts[request.tenant]
        account.all_s += seconds
        account.read_s += seconds * is_read
        account.weighed_s += seconds / self._weights[request.service_level or "default"]

    def backlogged(self) -> set[str]:
        """Who has something to be read."""
        return {one.request.tenant for one in self.sequences if one.next_position < one.prompt_len}

    def check(self, tenants: set[str]) -> None:
        read_s = sum(account.read_s for account in self.accounts.values())
        weights = {name: account.weight for name, account in self.accounts.items()}
        unevenness = max(account.unevenness for account in self.accounts.values())
        for name in tenants:
            share = weights[name] / sum(weights.values())
            lacks_s = share * read_s - self.accounts[name].all_s
            assert lacks_s <= STEP_S * unevenness + 1e-6, f"{name} lacks {lacks_s:.3f} s of its {share:.0%}"


weights = st.sampled_from([0.2, 0.5, 1.0, 2.0, 3.0, 8.0])
gaps_s = st.sampled_from([None, None, 0.02, 0.05, 0.1, 0.2])
"""Promised or aimed at: steps beside streams are as short as the tokens that always move, or as long as they may be."""


@st.composite
def asked(draw: st.DrawFn, tenants: str, classes: dict[str, list[str]]) -> tuple[str, str, int, int]:
    tenant = draw(st.sampled_from(tenants))
    return tenant, draw(st.sampled_from(classes[tenant])), draw(st.integers(1, 600)), draw(st.integers(1, 30))


@examples(60)
@given(data=st.data(), num_tenants=st.integers(2, 5), mixes=st.booleans())
def test_a_tenant_with_work_gets_its_share_less_a_step(data: st.DataObject, num_tenants: int, mixes: bool) -> None:
    """Everybody begins at once. More comes meanwhile, of any class of its tenant; where classes do not mix, the bound
    is one step's work exactly."""
    names = ["default", "one", "other"]
    levels = ServiceLevels(
        tuple(ServiceLevel(name, itl_s=data.draw(gaps_s), weight=data.draw(weights)) for name in names)
    )
    tenants = TENANTS[:num_tenants]
    classes = {tenant: names if mixes else [data.draw(st.sampled_from(names))] for tenant in tenants}
    played = Watched(levels, itl_target_s=data.draw(gaps_s))
    for tenant in tenants:
        played.add(0.0, 600, classes[tenant][0], tenant)
    for _ in range(data.draw(st.integers(0, 20))):
        tenant, level, num_tokens, answer = data.draw(asked(tenants, classes))
        played.add(0.0, num_tokens, level, tenant, answer)
    since_the_beginning, num_to_come = set(tenants), data.draw(st.integers(0, 20))
    while played.replica.busy:
        if num_to_come and played.replica.scheduler._next_step_id % 4 == 3:
            num_to_come -= 1
            tenant, level, num_tokens, answer = data.draw(asked(tenants, classes))
            played.add(played.replica.now_s, num_tokens, level, tenant, answer)
        played.play_a_step()
        since_the_beginning &= played.backlogged() - played.held
        played.check(since_the_beginning)
    assert all(one.is_finished for one in played.sequences)


def test_steps_that_a_promise_cuts_are_shared_alike() -> None:
    """Ten streams are promised 50 ms, so a step has 35 tokens of prompts: what one tenant is before another is never
    more than one such piece. Where the promise leaves no room, a piece is what always moves."""
    for itl_s, most_tokens in ((0.05, 35), (0.01, 16)):
        levels = ServiceLevels((ServiceLevel("default"), ServiceLevel("even", itl_s=itl_s)))
        played = Watched(levels)
        for _ in range(10):
            played.add(0.0, 1, "even", "writer", answer=300)
        while not all(one.num_output for one in played.sequences):
            played.play_a_step()
        for tenant in ("one", "other"):
            played.add(played.replica.now_s, 2000, "default", tenant)
        for _ in range(60):
            played.play_a_step()
            one, other = (played.accounts[tenant].read_s for tenant in ("one", "other"))
            assert abs(one - other) <= TOKEN_S * most_tokens + 1e-9
        assert TOKEN_S * 60 * most_tokens * 0.5 < one + other <= TOKEN_S * 60 * most_tokens + 1e-9


def test_a_small_request_of_another_class_costs_its_tenant_nothing() -> None:
    """The last request to come is of no weight: its tenant's share is that of the seconds that it was given."""
    levels = ServiceLevels((ServiceLevel("default"), ServiceLevel("heavy", weight=3.0)))
    played = Watched(levels)
    for _ in range(20):
        played.add(0.0, 100, "default", "light")
        played.add(0.0, 300, "heavy", "heavy")
    played.add(0.0, 10, "default", "heavy")
    while played.replica.now_s < 5.0:
        played.play_a_step()
    light, heavy = played.accounts["light"], played.accounts["heavy"]
    assert heavy.all_s >= 0.75 * (light.all_s + heavy.all_s) - STEP_S
