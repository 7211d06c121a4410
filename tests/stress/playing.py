"""Plays a scenario: a real Engine, Scheduler and KVLedger over the paged device, with the checker after every move."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer as Encoder
from tokenizers import models

from tests.stress.checker import BrokenRuleError, Checker
from tests.stress.device import PagedDevice
from tests.stress.disks import Folder, SlowDisk
from tests.stress.hash_model import LETTERS, VOCAB_SIZE, Answer
from tests.stress.scenario import (
    Abort,
    Arrive,
    Befall,
    Beside,
    Chunks,
    DiskBefall,
    Forget,
    Happening,
    Jump,
    Press,
    Restart,
    Scenario,
    Setup,
    Storm,
    Turns,
)
from tests.stress.trouble import VirtualClock, seconds_of
from twostroke.core.errors import BadRequestError, PromiseError
from twostroke.core.events import Event
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.core.step import Drafts
from twostroke.cost.floor import StepWork
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.worth import Worth
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.forecast import nominal_seconds
from twostroke.scheduling.pace import PrefillPace
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler
from twostroke.text.token_bytes import Spelling
from twostroke.text.tokenizer import Tokenizer


def _tokenizer() -> Tokenizer:
    """A letter a token."""
    return Tokenizer(
        Encoder(models.BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[])),
        Spelling.BYTE_LEVEL,
        vocab_size=VOCAB_SIZE,
        bos_token_id=None,
        eos_token_id=None,
        eos_token_ids=frozenset(),
    )


TOKENIZER = _tokenizer()


class AnyDrafts(Drafting):
    """Every number of drafts: left to the device, or guessed from what the host knows, rightly or not."""

    def __init__(self, answer_of: Callable[[Sequence], Answer], seed: int) -> None:
        self._answer_of, self._random = answer_of, random.Random(seed)

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        count = self._random.randint(0, most)
        if count == 0 or self._random.random() < 0.5:
            return Drafts(count) if count else None
        answer, first = self._answer_of(sequence), sequence.num_output
        places = range(first, first + count + self._random.randint(0, 4))
        guesses = [token for place in places if (token := answer.token(place)) is not None]
        if guesses and self._random.random() < 0.5:
            wrong = self._random.randrange(len(guesses))
            guesses[wrong] = (guesses[wrong] + 1) % VOCAB_SIZE
        return Drafts(count, tuple(guesses), start=len(sequence.tokens))


def _predicting(factor: float) -> Callable[[StepWork], float]:
    """Of a step, so many times what the device takes."""
    return lambda work: factor * seconds_of(work.num_tokens)


def _all_levels(setup: Setup) -> ServiceLevels:
    """The default among them, which promises nothing unless the scenario says so."""
    named = any(level.name == DEFAULT_LEVEL for level in setup.levels)
    return ServiceLevels(setup.levels if named else (ServiceLevel(DEFAULT_LEVEL), *setup.levels))


@dataclass(frozen=True)
class Outcome:
    num_requests: int
    num_tokens: int
    num_steps: int
    num_preemptions: int
    num_tier_tokens: int
    """Whose KV came from host memory or from disk."""
    longest_share: float
    digest: str
    """Of all that was told, and when: two plays of one scenario have the same."""


COUNTED = ("num_requests", "num_tokens", "num_steps", "num_preemptions", "num_tier_tokens")


def _has_second(setup: Setup, is_second: bool) -> bool:
    return not is_second and setup.tiers is not None and setup.tiers.disk_bytes is not None


class AlwaysWorth(Worth):
    def may_spill(self, seconds: float) -> bool:
        return True


class Player:
    """One engine, and those that come after it where it is restarted."""

    def __init__(
        self, setup: Setup, folder: Folder, clock: VirtualClock | None = None, *, is_second: bool = False
    ) -> None:
        self.setup, self.folder = setup, folder
        self.clock = clock or VirtualClock()
        self.beside = Player(setup, folder, self.clock, is_second=True) if _has_second(setup, is_second) else None
        self.num_requests = 0
        self._generation = 500 if is_second else 0
        self._outcomes: list[Outcome] = []
        self._trace = blake2b(digest_size=8)
        self.begin()

    def begin(self) -> None:
        """An engine starts."""
        setup, config, layout = self.setup, SchedulerConfig(**self.setup.config), self.setup.layout
        self._generation += 1
        self.device = PagedDevice(
            layout,
            self.clock,
            max_tokens_per_step=config.max_tokens_per_step,
            max_drafts=setup.max_drafts,
            seed=setup.seed + self._generation,
            bytes_per_s=1e3 if setup.tiers is None else setup.tiers.bytes_per_s,
            slowness=setup.slowness,
            generation=self._generation,
        )
        self.tiers = self._make_tiers()
        self.disk = None if self.tiers is None else self.tiers.disk
        self.slow_disk = None if self.disk is None else SlowDisk(self.tiers, setup.seed + self._generation)
        digest = (lambda before, tokens: bytes([(sum(before) + sum(tokens)) % 2])) if setup.colliding else None
        key = None if self.disk is None else self.disk.key
        caching = config.prefix_caching
        tokens = config.snapshot_tokens
        self.ledger = KVLedger(
            layout, prefix_caching=caching, key=key, digest=digest, tiers=self.tiers, snapshot_tokens=tokens
        )
        self.limit = min(config.max_context, self.ledger.max_total_tokens or config.max_context)
        predicted = None if setup.predicts is None else _predicting(setup.predicts * setup.slowness)
        scheduler = Scheduler(
            config,
            layout,
            ledger=self.ledger,
            pace=None if setup.itl_target_s is None else PrefillPace(predicted or nominal_seconds, setup.itl_target_s),
            drafting=AnyDrafts(self._answer_of, setup.seed) if setup.max_drafts else None,
            max_drafts=setup.max_drafts,
            policy=setup.policy,
            levels=_all_levels(setup),
            step_seconds=predicted,
        )
        tokenizer = TOKENIZER if setup.has_text else None
        self.engine = Engine(scheduler, self.device, VOCAB_SIZE, tokenizer, run_ahead=setup.run_ahead, clock=self.clock)
        self.checker = Checker(self.engine, self.device, setup)

    def _make_tiers(self) -> KVTiers | None:
        asked, layout = self.setup.tiers, self.setup.layout
        if asked is None:
            return None
        disk = None
        if asked.disk_bytes is not None:
            disk = DiskTier(self.folder.path, asked.disk_bytes, repr(layout), layout.block_size)
        num_slots = [asked.host_slots] * len(layout.groups)
        worth = AlwaysWorth() if asked.always_spills else Worth(lambda start, num_tokens: 0.001 * num_tokens)
        blocks = self.device.keep_blocks(num_slots)
        return KVTiers(HostTier(num_slots), self.device.block_format, blocks, disk=disk, worth=worth)

    def _answer_of(self, sequence: Sequence) -> Answer:
        return self.checker.streams[sequence.request.request_id, sequence.sample_index].answer

    def play(self, happenings: tuple[Happening, ...]) -> Outcome:
        for happening in happenings:
            self.happen(happening)
        self.end()
        outcomes = [*self._outcomes, *(() if self.beside is None else (self.beside.play(()),))]
        return Outcome(
            *(sum(getattr(outcome, name) for outcome in outcomes) for name in COUNTED),
            longest_share=max(outcome.longest_share for outcome in outcomes),
            digest="".join(outcome.digest for outcome in outcomes),
        )

    def end(self) -> None:
        """All that is asked is answered, and the engine leaves."""
        self.device.next_trouble = None
        while self.engine.busy:
            self.turn()
        if self.slow_disk is not None:
            self.slow_disk.finish()
            self.ledger.tiers.settle()
        self.checker.ended()
        self.engine.close()
        self._note()

    def kill(self) -> None:
        """Whoever asked learns nothing more; what was queued for the disk is lost."""
        if self.disk is not None:
            self.disk.close()
        self._note()

    def _note(self) -> None:
        counts = self.engine.scheduler.counts()
        checker = self.checker
        self._outcomes.append(
            Outcome(
                len({name for name, _ in checker.streams}),
                checker.num_tokens,
                checker.num_steps,
                counts.preemptions,
                sum(counts.tier_hit_tokens),
                checker.longest_share,
                self._trace.hexdigest(),
            )
        )

    def happen(self, happening: Happening) -> None:
        match happening:
            case Arrive():
                self.arrive(happening)
            case Turns(count):
                for _ in range(count):
                    self.turn()
            case Abort(number):
                self.abort(f"r{number}")
            case Storm(share, seed):
                source = random.Random(seed)
                for name in self.checker.unfinished:
                    if source.random() < share:
                        self.abort(name)
            case Jump(seconds):
                self.clock.now_s += seconds
                self.checker.jumped(seconds)
            case Befall(trouble):
                self.device.next_trouble = trouble
            case Forget():
                self.engine.clear_prefixes()
            case Chunks(most):
                self.engine.scheduler.limit_chunks(most)
            case Press(like, keep, turns):
                before = set(self.checker.unfinished)
                for _ in range(turns):
                    if before.isdisjoint(self.checker.unfinished):
                        break
                    if len(self.checker.unfinished) < keep:
                        self.arrive(like)
                    self.turn()
            case DiskBefall(trouble):
                self.folder.befall(trouble, self.disk)
            case Restart(kill):
                self.kill() if kill else self.end()
                self.begin()
            case Beside(inner):
                if self.beside is not None:
                    self.beside.happen(inner)
        self.checker.look()

    def arrive(self, arrival: Arrive) -> None:
        sampling = SamplingParams(**arrival.sampling)
        name, seed = f"r{self.num_requests}", arrival.sampling["seed"]
        request = Request(name, arrival.prompt, sampling, arrival_s=self.clock.now_s, seed=seed, **arrival.request)
        self.num_requests += 1
        total = self.limit if sampling.max_tokens is None else len(arrival.prompt) + sampling.max_tokens
        fits = len(arrival.prompt) < self.limit and total <= self.limit
        try:
            self.engine.add(request)
        except BadRequestError as error:
            if fits:
                raise BrokenRuleError(f"{name} was refused, and would have fitted: {error}") from error
            return
        except PromiseError as error:
            self._check_refusal(request, error)
            return
        if not fits:
            raise BrokenRuleError(f"{name} was taken, and can never end")
        self.checker.arrived(request, total)

    def _check_refusal(self, request: Request, error: PromiseError) -> None:
        level = _all_levels(self.setup).named(request.service_level)
        if level.when_late != "refuse" or not error.retry_after_s > 0.0:  # infinite: never
            raise BrokenRuleError(f"{request.request_id} of {level} was refused for {error.retry_after_s} s: {error}")

    def abort(self, name: str) -> None:
        self.checker.aborted(name)
        self.engine.abort(name)

    def turn(self) -> None:
        """A step of the engine, if it has anything to do; one more where it is interrupted."""
        if self.slow_disk is not None:
            self.slow_disk.turn()
        if not self.engine.busy:
            return
        try:
            events = self.engine.step()
        except KeyboardInterrupt:
            self.checker.look()
            events = self.engine.step()
        self._trace.update(repr([self.clock.now_s, *map(_told, events)]).encode())
        self.checker.stepped(events)
        for seq_id in self.engine.scheduler._admission._arriving:
            self.device.let_in.setdefault(seq_id, self.device.last_applied)
        in_flight = {step.step_id for step, _, _ in self.engine._in_flight}
        self.device.last_applied = min(in_flight, default=self.engine.scheduler._next_step_id) - 1
        for step_id in [step_id for step_id in self.device.harmed if step_id not in in_flight]:
            self.checker.settled(step_id)


def _told(event: Event) -> tuple[object, ...]:
    return tuple(event[:4])


def play(scenario: Scenario) -> Outcome:
    """Raises `BrokenRuleError`, or whatever the engine raises, where something does not hold."""
    with TemporaryDirectory(prefix="stress-") as path:
        folder = Folder(Path(path), scenario.setup.seed)
        with folder.installed():
            return Player(scenario.setup, folder).play(scenario.happenings)
