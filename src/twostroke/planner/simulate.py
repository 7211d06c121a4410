"""A deployment that does not exist, serving a trace: the real Scheduler and KVLedger of each replica on a virtual
clock, and instead of a device the cost of each step. The loop is the engine's: a step launched ahead, results in launch
order, newcomers taken between steps. Turns in which streams only write are timed one by one and told to the scheduler
together."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Series
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import inf

from twostroke.core.errors import BadRequestError, PromiseError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.service_level import ServiceLevels
from twostroke.core.step import SampledToken, Step, StepResult
from twostroke.cost.classify import RequestLengths, WorkloadClass, classify
from twostroke.cost.floor import StepWork, work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.kv.ledger import KVLedger
from twostroke.kv.prefix_index import quick_digest
from twostroke.planner.glide import Foreseen, Glide
from twostroke.planner.report import Served, SimulationReport
from twostroke.planner.speculating import Speculating, SupposedDrafting
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.advance import SequenceAdvance
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.pace import pace_of
from twostroke.scheduling.policies import DEFAULT_POLICY
from twostroke.scheduling.scheduler import Scheduler

ROUTERS = ("round-robin", "least-loaded")
SAMPLED = (SampledToken(0),)
CLASSIFIED_REQUESTS = 1000
"""This many requests of a long trace, evenly spread, tell its class."""
FILLER_TOKEN = 1
"""Whatever follows the token that tells a prompt from all others. Not what is sampled: no prompt goes on like an
answer."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica; all are alike."""

    step_seconds: Callable[[StepWork], float]
    """What a step should take: `StepCost.seconds`, or an estimate."""
    shape: ModelShape
    ceilings: Ceilings
    scheduler: SchedulerConfig
    layout: KVLayout
    host_s: float = 0.0
    """What the host adds to a step, where steps follow each other."""
    newcomer_s: float = 0.0
    """What newcomers wait for beside steps, from being taken in to the hand-over of the first token: once a step that
    brings some, however many, for most of it is waking an idle engine. Hidden behind the step in flight, if there is
    one."""
    newcomer_s_per_token: float = 0.0
    """On top, for each token of their prompts, which are checked and looked up; hidden likewise."""
    itl_target_s: float | None = None
    run_ahead: bool = True
    speculating: Speculating | None = None
    """How often drafts are supposed to hold; None: nobody drafts."""
    policy: str = DEFAULT_POLICY
    levels: ServiceLevels = field(default_factory=ServiceLevels)

    @property
    def promises_anything(self) -> bool:
        """Whether somebody said what is promised."""
        return any(level.ttft_s is not None or level.itl_s is not None for level in self.levels.levels)


class Replica:
    """An engine's loop on a clock of its own."""

    def __init__(self, spec: ReplicaSpec) -> None:
        pace = pace_of(spec.step_seconds, None if spec.itl_target_s is None else 1e3 * spec.itl_target_s)
        caching = spec.scheduler.prefix_caching
        ledger = KVLedger(spec.layout, prefix_caching=caching, digest=quick_digest, explains=False)
        drafting = None
        if spec.speculating is not None:
            drafting = SupposedDrafting(spec.speculating, spec.step_seconds)
        self.scheduler = Scheduler(
            spec.scheduler,
            spec.layout,
            ledger=ledger,
            pace=pace,
            drafting=drafting,
            policy=spec.policy,
            levels=spec.levels,
            step_seconds=spec.step_seconds,
        )
        self._spec = spec
        self._max_in_flight = 2 if spec.run_ahead else 1
        self._in_flight: deque[tuple[Step, float, float]] = deque()  # with its seconds, and when it ends
        self._glide: Glide | None = None
        """What the scheduler is yet to be told of: when all its turns are over, or a request comes."""
        self._device_free_s = 0.0
        self.now_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_unfinished = 0

    @property
    def busy(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, request: Request, at_s: float | None = None) -> None:
        """Between steps; an idle replica wakes up for it. `at_s`: when it comes here; None: when it arrives."""
        self.settle()
        if not self.busy:
            self.now_s = max(self.now_s, request.arrival_s if at_s is None else at_s)
        self.scheduler.add(request)
        self.num_unfinished += 1

    def play_until(self, moment_s: float) -> list[SequenceAdvance]:
        """Step on as long as there is work and the clock is before that moment: who has ended."""
        ended: list[SequenceAdvance] = []
        while self.now_s < moment_s and self.busy:
            if self._glide is None:
                self._glide = self._next_glide()
            if self._glide is None:
                ended += [advance for advance in self.step() if advance.finished]
            else:
                self._go_on(self._glide, moment_s)
        return ended

    def step(self) -> list[SequenceAdvance]:
        """Launch what can be launched, and let the clock run to the end of the oldest step in flight: what it did."""
        self.settle()
        while len(self._in_flight) < self._max_in_flight:
            step = self.scheduler.schedule(self.now_s)
            if step is None:
                break
            newcomers_s = 0.0
            if step.joins:
                num_tokens = sum(len(join.request.prompt_token_ids) for join in step.joins)
                newcomers_s = self._spec.newcomer_s + num_tokens * self._spec.newcomer_s_per_token
            self._in_flight.append((step, *self._launch(work_of(step), newcomers_s)))
        if not self._in_flight:
            raise RuntimeError("the scheduler has work and nothing to launch")
        step, seconds, ends_s = self._in_flight.popleft()
        self.now_s = max(self.now_s, ends_s)
        return self._take_in(step, seconds, self.now_s)

    def _launch(self, work: StepWork, newcomers_s: float = 0.0) -> tuple[float, float]:
        """The step's seconds, and when it ends."""
        seconds = self._spec.step_seconds(work)
        self._device_free_s = max(self.now_s + newcomers_s, self._device_free_s) + self._spec.host_s + seconds
        self.busy_s += seconds
        self.num_steps += 1
        return seconds, self._device_free_s

    def _take_in(self, step: Step, seconds: float, now_s: float, num_tokens: int = 1) -> list[SequenceAdvance]:
        sampled = dict.fromkeys([slot[0] for slot in step.decodes], SAMPLED * num_tokens)
        if self._spec.speculating is not None:
            sampled |= held_tokens(self._spec.speculating, step)
        for chunk in step.prefills:
            if chunk.samples:
                sampled[chunk.seq_id] = SAMPLED
        advances = self.scheduler.apply(step, StepResult(step.step_id, sampled, compute_s=seconds), now_s)
        for advance in advances:
            self.num_unfinished -= advance.finished
        return advances

    def _next_glide(self) -> Glide | None:
        """None: fewer turns than it is worth it for, or too few blocks: each that is needed must be there beforehand,
        so that it does not matter who takes his first."""
        if self._spec.speculating is not None:  # how many tokens a turn brings is drawn for each
            return None
        if len(self._in_flight) < self._max_in_flight - 1 or not (streams := self.scheduler.steady_streams()):
            return None
        before = self._in_flight[0] if self._in_flight else None
        if before is not None and before[0].prefills:  # blocks of a prompt become findable first, evictions come then
            return None
        ledger, config = self.scheduler.ledger, self.scheduler.config
        if ledger.states is not None:  # several snapshots may be due in what would be one step
            return None
        # No answer may end in a turn. Without running ahead, the last turn takes in what it launches.
        left = min(one.max_total_tokens - one.next_position for one in streams) - (2 if before is None else 1)
        num_turns = min(left, config.max_tokens_per_step // len(streams))
        num_blocks = len(streams) * (num_turns // ledger.layout.block_size + 1)
        # A window gives blocks back as it moves on: of a pool that is full, others would be evicted than one by one.
        has_window = any(group.window is not None for group in ledger.layout.groups)
        # What several streams give back stays cached, and is evicted in the order in which they gave it.
        if has_window and config.prefix_caching and len(streams) > 1:
            return None
        free = min(pool.num_free if has_window else pool.num_available for pool in ledger.pools)
        return Glide(streams, num_turns, before) if num_turns > 2 and num_blocks <= free else None

    def _go_on(self, glide: Glide, moment_s: float) -> None:
        """Time its turns up to that moment."""
        while self.now_s < moment_s and not glide.is_over:
            glide.launched_s.append(self.now_s)
            glide.steps.append(self._launch(glide.work))
            self.now_s = max(self.now_s, glide.oldest_ends_s)
            glide.taken_s.append(self.now_s)
        if glide.is_over:
            self.settle()

    def settle(self) -> None:
        """Tell the scheduler of its turns, as of one step of several tokens a slot."""
        glide, self._glide = self._glide, None
        if glide is None or not glide.steps:
            return
        taken_s, steps = glide.taken_s, glide.steps
        num_tokens = len(steps) - (glide.before is not None)
        self.scheduler.draft(Foreseen(max(1, num_tokens)))
        wide = self.scheduler.schedule(glide.launched_s[0])
        self.scheduler.draft(None)
        assert wide is not None
        if glide.before is not None:
            step, seconds, _ = self._in_flight.popleft()
            self._take_in(step, seconds, taken_s.pop(0))
            last = self.scheduler.schedule(glide.launched_s[-1]) if num_tokens else wide
            assert last is not None
            self._in_flight.append((last, *steps.pop()))
        if num_tokens:
            self._take_in(wide, sum(seconds for seconds, _ in steps), taken_s[-1], num_tokens)
            for one in glide.streams:
                one.timing.token_times_s[-num_tokens:] = taken_s


def held_tokens(speculating: Speculating, step: Step) -> dict[int, tuple[SampledToken, ...]]:
    """What its slots with drafts bring."""
    return {
        slot.seq_id: SAMPLED * (1 + speculating.held(slot.seq_id, step.step_id, slot.drafts.most))
        for slot in step.decodes
        if slot.drafts is not None
    }


class Prompts:
    """Token ids that agree where a trace says so, and nowhere else."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._prefixes: dict[str, int] = {}
        self._sampling: dict[int, SamplingParams] = {}

    def request(self, asked: TraceRequest) -> Request:
        """A prefix is found by all tokens before it: one that nobody else has keeps apart what comes behind. The last
        token is nobody else's in any case, and so is the answer."""
        number = next(self._numbers)
        shared = min(asked.prefix_tokens, asked.prompt_tokens - 1)
        prompt: tuple[int, ...] = ()
        if asked.prefix is not None and shared:
            prompt = _begun_by(2 * self._prefixes.setdefault(asked.prefix, number), shared)
        prompt += _begun_by(2 * number + 1, asked.prompt_tokens - len(prompt))
        sampling = self._sampling.get(asked.output_tokens)
        if sampling is None:
            sampling = SamplingParams(max_tokens=asked.output_tokens, ignore_eos=True)
            self._sampling[asked.output_tokens] = sampling
        name = f"simulated-{number}"
        return Request(
            name,
            prompt,
            sampling,
            arrival_s=asked.arrival_s,
            tenant=asked.tenant,
            call=name if asked.tenant else "",
            service_level=asked.service_level,
        )


def _begun_by(token: int, num_tokens: int) -> tuple[int, ...]:
    return (token,) + (FILLER_TOKEN,) * (num_tokens - 1)


def simulate(
    spec: ReplicaSpec,
    trace: Series[TraceRequest],
    *,
    replicas: int = 1,
    router: str = "least-loaded",
) -> SimulationReport:
    """Serve a whole trace. What could never be served is counted, as a server would turn it away."""
    if replicas < 1:
        raise BadRequestError(f"there must be at least one replica, not {replicas}")
    if router not in ROUTERS:
        raise BadRequestError(f"the router must be one of {', '.join(ROUTERS)}, not {router!r:.60}")
    for name in {asked.service_level for asked in trace}:
        spec.levels.named(name)  # raises for one that is not there
    with collector_paused():
        return _serve([Replica(spec) for _ in range(replicas)], trace, router)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A simulation makes millions of objects and no cycles: to look for cycles takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _serve(running: list[Replica], trace: Series[TraceRequest], router: str) -> SimulationReport:
    prompts, served, refused = Prompts(), Served(), 0
    for number, asked in enumerate(trace):
        for replica in running:
            if ended := replica.play_until(asked.arrival_s):
                served.take(advance.sequence.timing for advance in ended)
        chosen = running[number % len(running)]
        if router == "least-loaded":
            chosen = min(running, key=lambda replica: replica.num_unfinished)
        try:
            chosen.add(prompts.request(asked))
        except BadRequestError:
            refused += 1
        except PromiseError:
            served.refuse(asked.service_level)
    for replica in running:
        served.take(advance.sequence.timing for advance in replica.play_until(inf))
    began_s = trace[0].arrival_s if trace else 0.0
    return SimulationReport.of(
        served,
        num_refused=refused,
        duration_s=max((replica.now_s for replica in running), default=0.0) - began_s,
        busy_s=sum(replica.busy_s for replica in running),
        num_steps=sum(replica.num_steps for replica in running),
        num_preemptions=sum(replica.scheduler.counts().preemptions for replica in running),
        prefix_hit_tokens=sum(replica.scheduler.counts().prefix_hit_tokens for replica in running),
        replicas=len(running),
    )


def classify_trace(spec: ReplicaSpec, trace: Series[TraceRequest], report: SimulationReport) -> WorkloadClass | None:
    """Which phase binds a trace, by the lengths it asked for, as many streams sharing a step as did on average, and of
    shared beginnings what was found cached. None: nothing of it was served."""
    served = [asked for asked in trace if asked.prompt_tokens + asked.output_tokens <= spec.scheduler.max_context]
    if not served or not report.num_steps:
        return None
    num_shared = sum(asked.prefix_tokens for asked in served)
    hit_share = min(1.0, report.prefix_hit_tokens / num_shared) if num_shared else 0.0
    sample = [
        RequestLengths(
            asked.prompt_tokens,
            asked.output_tokens,
            min(asked.prompt_tokens - 1, int(hit_share * asked.prefix_tokens)),
        )
        for asked in served[:: -(-len(served) // CLASSIFIED_REQUESTS)]
    ]
    num_slots = len(report.served.itl_s)  # a gap is what a slot brings
    groups = zip(spec.layout.groups, spec.shape.kv_groups, strict=True)
    return classify(
        spec.shape,
        spec.ceilings,
        sample,
        max(1, round(num_slots / report.num_steps)),
        step_seconds=spec.step_seconds if spec.speculating is None else spec.speculating.a_token(spec.step_seconds),
        kv_space_bytes=sum(spec.layout.positions(group) * each.bytes_per_token for group, each in groups),
    )
