"""A scenario: an engine's set-up and what happens to it, as plain data made from one seed. Any part of what happens may
be left out, and what remains is a scenario still: so a failure can be made small (`shrinking.py`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.stress.disks import DiskTrouble
from tests.stress.hash_model import LETTERS, VOCAB_SIZE
from tests.stress.trouble import Trouble
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel
from twostroke.scheduling.policies import POLICIES

PRIORITIES = (0, 0, 0, 0, -3, -1, 1, 2)


@dataclass(frozen=True)
class TierSetup:
    host_slots: int
    """Of each KV group."""
    bytes_per_s: float
    """Of copies between the device and host memory."""
    always_spills: bool
    """Else only as much as costs decode nothing."""
    disk_bytes: int | None
    """None: no disk."""


@dataclass(frozen=True)
class Setup:
    block_size: int
    groups: tuple[tuple[int | None, int], ...]
    """Of each KV group: its window and its blocks."""
    num_states: int | None
    """The slots of one more group, of states."""
    config: dict[str, Any]
    """Of the scheduler."""
    run_ahead: bool
    itl_target_s: float | None
    """None: no pace."""
    max_drafts: int
    colliding: bool
    """Prefix hashes of one bit: only the comparison of tokens keeps prefixes apart."""
    has_text: bool
    tiers: TierSetup | None
    policy: str
    levels: tuple[ServiceLevel, ...]
    """Classes of requests, beside the default."""
    predicts: float | None
    """What is predicted for a step, times what it takes; None: nobody predicts."""
    slowness: float
    """Times what a step takes: seconds count for more where steps are long."""
    seed: int
    """Of the device, and of who drafts."""

    @property
    def layout(self) -> KVLayout:
        groups = tuple(KVGroup((layer,), window, blocks) for layer, (window, blocks) in enumerate(self.groups))
        states = () if self.num_states is None else (KVGroup((len(groups),), None, self.num_states, "state"),)
        return KVLayout(self.block_size, groups + states)


@dataclass(frozen=True)
class Arrive:
    """A request comes."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    request: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turns:
    """The engine steps so many times, if it has work."""

    count: int


@dataclass(frozen=True)
class Abort:
    """A client goes away: whose request was the `number`th, or has ended and does not mind."""

    number: int


@dataclass(frozen=True)
class Storm:
    """A share of all clients goes away at once."""

    share: float
    seed: int


@dataclass(frozen=True)
class Jump:
    """The clock is put forward, or back."""

    seconds: float


@dataclass(frozen=True)
class Befall:
    """The next step meets this."""

    trouble: Trouble


@dataclass(frozen=True)
class Forget:
    """`clear_prefixes`."""


@dataclass(frozen=True)
class Chunks:
    """`limit_chunks`."""

    most: int | None


@dataclass(frozen=True)
class Press:
    """One more such request comes whenever fewer than `keep` are there, until those who came before have ended, or for
    so many turns: nobody may wait forever."""

    like: Arrive
    keep: int
    turns: int


@dataclass(frozen=True)
class DiskBefall:
    """Something happens to the folder of the disk tier."""

    trouble: DiskTrouble


@dataclass(frozen=True)
class Restart:
    """The engine ends, and another begins with the same folder. `kill`: in the middle of everything; else it finishes
    what it has, and leaves on disk what is worth it."""

    kill: bool


@dataclass(frozen=True)
class Beside:
    """This happens to a second engine, which shares the folder."""

    happening: Happening


Happening = Arrive | Turns | Abort | Storm | Jump | Befall | Forget | Chunks | Press | DiskBefall | Restart | Beside


@dataclass(frozen=True)
class Scenario:
    setup: Setup
    happenings: tuple[Happening, ...]

    def __str__(self) -> str:
        lines = ",\n        ".join(map(repr, self.happenings))
        return f"Scenario(\n    {self.setup!r},\n    (\n        {lines},\n    ),\n)"


def _level(name: str, source: random.Random) -> ServiceLevel:
    pick = source.choice
    return ServiceLevel(
        name,
        ttft_s=pick([None, 0.02, 0.2, 2.0]),
        itl_s=pick([None, 0.011, 0.05, 1.0]),
        weight=pick([0.5, 1.0, 4.0]),
        when_late=pick(["queue", "queue", "refuse"]),
    )


class _Maker:
    """Draws everything from one source. A scenario has a character, so that each kind of trouble is met alone and in
    company, at rates at which something else still gets through."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_long = self._chance(0.15)
        self.is_tiny = self._chance(0.6)
        self.max_context = self.random.choice([120, 200, 320] if self.is_long else [20, 28, 40, 64])
        self.block_size = self.random.choice([4, 8, 16] if self.is_long else [1, 2, 3, 4])
        self.trouble_rate = self.random.choice([0.0, 0.0, 0.1, 0.3])
        self.abort_rate = self.random.choice([0.0, 0.05, 0.3])
        self.jump_rate = self.random.choice([0.0, 0.0, 0.1])
        self.num_tenants = self.random.choice([1, 1, 2, 4])
        self.policy = self.random.choice(list(POLICIES))
        self.slowness = self.random.choice([1.0, 30.0])
        self.aging_s = self.random.choice([0.0, 0.1, 1.0, 30.0])
        names = self.random.choice([(), ("one",), ("one", "other")])
        self.levels = tuple(_level(name, self.random) for name in names)
        apart = random.Random(f"default {seed}")  # so that the rest of a seed is what it was
        self.default = _level(DEFAULT_LEVEL, apart) if apart.random() < 0.4 else None
        self.has_tiers = self._chance(0.35)
        self.has_disk = self.has_tiers and self._chance(0.5)
        self.has_neighbour = self.has_disk and self._chance(0.3)
        half = self.max_context // 2
        self.prefixes = [self._tokens(half) for _ in range(self.random.randint(1, 6 if self.has_tiers else 3))]
        self.lengths = self.random.choice([[1, 2, 5, 12, half], [half // 2, half, None]])
        self.has_text = self._chance(0.3)

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _tokens(self, most: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, most)))

    def scenario(self) -> Scenario:
        happenings: list[Happening] = []
        for _ in range(self.random.randint(3, 30)):
            happenings += self._happen()
        if self._chance(0.3):
            like = self._arrive(max_tokens=self.random.randint(1, 8))
            ends_soon = self.aging_s <= 1.0 and (self.slowness > 1.0 or self.policy == "fifo")
            happenings.append(Press(like, keep=self.random.randint(2, 12), turns=1500 if ends_soon else 100))
        return Scenario(self._setup(), tuple(happenings))

    def _setup(self) -> Setup:
        pick = self.random.choice
        enough = -(-self.max_context // self.block_size)
        least, most = (enough // 2, enough + 1) if self.is_tiny else (enough, 3 * enough)
        windows = [pick([None, None, *range(1, 12)]) for _ in range(pick([1, 1, 2, 3]))]
        groups = tuple((window, self.random.randint(max(2, least), most)) for window in windows)
        num_states = self.random.randint(1, 9) if self._chance(0.1) else None
        config = {
            "max_context": self.max_context,
            "max_tokens_per_step": pick([64, 128, 512] if self.is_long else [1, 6, 12, 24, 24, 64]),
            "max_running": pick([1, 2, 4, 8, 12]),
            "max_chunk_tokens": pick([None, None, None, 1, 7]),
            "prefix_caching": self.has_tiers or self._chance(0.85),
            "kv_watermark": pick([0.0, 0.0, 0.01, 0.3]),
            "priority_aging_s": self.aging_s,
        }
        if num_states is not None:
            config["snapshot_tokens"] = pick([1, 1, 8, 64])
        return Setup(
            block_size=self.block_size,
            groups=groups,
            num_states=num_states,
            config=config,
            run_ahead=self._chance(0.75),
            itl_target_s=pick([None, None, 0.02, 0.2]),
            max_drafts=pick([0, 0, 1, 3, 7]),
            colliding=self._chance(0.1) and not self.has_disk,
            has_text=self.has_text,
            tiers=self._tiers() if self.has_tiers else None,
            policy=self.policy,
            levels=self.levels if self.default is None else (self.default, *self.levels),
            predicts=pick([None, 1.0, 1.0, 0.1, 10.0]),
            slowness=self.slowness,
            seed=self.random.getrandbits(32),
        )

    def _tiers(self) -> TierSetup:
        pick = self.random.choice
        return TierSetup(
            host_slots=pick([2, 6, 40]),
            bytes_per_s=pick([1e3, 1e5, 1e9]),
            always_spills=self._chance(0.7),
            disk_bytes=pick([5_000, 100_000]) if self.has_disk else None,
        )

    def _happen(self) -> list[Happening]:
        """One or a few things, and mostly some turns behind them."""
        found: list[Happening] = []
        if self._chance(0.08):  # a burst
            found += [self._arrive() for _ in range(self.random.randint(3, 16))]
        elif self._chance(0.7):
            found.append(self._arrive())
        if self._chance(self.abort_rate):
            found.append(self._go_away())
        if self._chance(self.trouble_rate):
            found.append(Befall(self.random.choice(list(Trouble))))
        if self._chance(self.jump_rate):
            found.append(Jump(self.random.choice([-100.0, -3.0, -0.01, 5.0, 3600.0])))
        if self._chance(0.04):
            found.append(Forget())
        if self._chance(0.02):
            found.append(Chunks(self.random.choice([None, 1, 5])))
        if self.has_disk and self._chance(0.1):
            found.append(DiskBefall(self.random.choice(list(DiskTrouble))))
        if self.has_disk and self._chance(0.05):
            found.append(Restart(kill=self._chance(0.5)))
        if self.has_neighbour:
            found = [Beside(one) if self._chance(0.3) and not isinstance(one, DiskBefall) else one for one in found]
            found.append(Beside(Turns(self.random.choice([0, 1, 3]))))
        if self._chance(0.8):
            found.append(Turns(self.random.choice([1, 1, 1, 2, 3, 9])))
        return found

    def _go_away(self) -> Happening:
        if self._chance(0.2):
            return Storm(self.random.choice([0.3, 0.8, 1.0]), self.random.getrandbits(32))
        return Abort(self.random.randrange(64))

    def _arrive(self, **sampling: Any) -> Arrive:
        pick = self.random.choice
        prefix = pick(self.prefixes)
        shared = len(prefix) if self.has_tiers and self._chance(0.7) else self.random.randint(0, len(prefix))
        prompt = prefix[:shared] + self._tokens(pick([1, 4, self.max_context // 4]))
        chosen: dict[str, Any] = {
            "max_tokens": pick(self.lengths),
            "n": pick([1, 1, 1, 1, 2, 4]),
            "seed": self.random.randrange(4),
            "stop_token_ids": tuple(self.random.randrange(VOCAB_SIZE) for _ in range(pick([0, 0, 1, 3]))),
            "min_tokens": pick([0, 0, 0, 1]),
            "prompt_logprobs": pick([None, None, None, None, None, None, 0]),
            "logprobs": pick([None, None, 0]),
        }
        if self.has_text and self._chance(0.4):
            chosen["stop"] = (pick(LETTERS), pick(LETTERS) + pick(LETTERS))[: pick([1, 2])]
            chosen["include_stop_string"] = self._chance(0.5)
        request: dict[str, Any] = {
            "priority": pick(PRIORITIES),
            "cache_salt": pick(["", "", "", "", "", "other"]),
            "tenant": f"tenant {self.random.randrange(self.num_tenants)}" if self.num_tenants > 1 else "",
            "call": pick(["", "", "first", "second", f"own {self.random.randrange(100)}"]),
            "eos_token_ids": frozenset({3}) if self._chance(0.3) else frozenset(),
            "service_level": pick(["", *(level.name for level in self.levels)]),
        }
        return Arrive(prompt, {**chosen, **sampling}, request)


def scenario_of(seed: int) -> Scenario:
    return _Maker(seed).scenario()
