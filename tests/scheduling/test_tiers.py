"""Tiers as the scheduler uses them: what comes back, from where, and when. The fake backend checks every key."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scheduling.fake_backend import fake_format
from tests.scheduling.loop import Loop, layout, request
from twostroke.core.errors import PromiseError
from twostroke.core.kv_layout import KVLayout
from twostroke.core.sequence import FinishReason, SequenceState
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.core.timing import TierTokens
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.kv.tiers.worth import Worth
from twostroke.scheduling.victims import loss

WINDOWED = layout((None, 10), (5, 6))


def disk_tier(folder: Path, kv_layout: KVLayout, limit_bytes: int = 1 << 20) -> DiskTier:
    return DiskTier(folder, limit_bytes, fake_format(kv_layout).described(), kv_layout.block_size)


def evict(loop: Loop, name: str = "other") -> None:
    """Fill the device with something else."""
    for salt in (name, f"{name} too"):
        loop.add(request(salt, range(28), salt=salt, max_tokens=8))
        loop.run()


@pytest.mark.parametrize("kv_layout", [layout((None, 10)), WINDOWED, layout((None, 9), (3, 9), (None, 12))])
def test_what_was_evicted_comes_back_from_host_memory(kv_layout: KVLayout) -> None:
    loop = Loop(kv_layout, host_slots=20)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    loop.run()
    assert again.timing.cached_tokens == 20
    assert again.timing.tier_tokens.host > 0 and again.timing.tier_tokens.disk == 0
    assert loop.scheduler.counts().tier_hit_tokens == again.timing.tier_tokens
    loop.scheduler.use_policy("slack", ServiceLevels())
    assert loop.scheduler.counts().tier_hit_tokens == again.timing.tier_tokens, "another policy counts on"
    loop.check_outputs()


@pytest.mark.parametrize("with_disk", [False, True])
def test_what_tiers_hold_is_not_refused_as_too_long_to_read(tmp_path: Path, with_disk: bool) -> None:
    """A token takes a second to read: of 22 tokens 20 are to be loaded, and 8 seconds were promised."""
    kv_layout = layout((None, 10))
    levels = ServiceLevels((ServiceLevel("default"), ServiceLevel("strict", ttft_s=8.0, when_late="refuse")))
    disk = disk_tier(tmp_path, kv_layout) if with_disk else None
    loop = Loop(kv_layout, host_slots=20, disk=disk, levels=levels, step_seconds=lambda work: float(work.num_tokens))
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    with pytest.raises(PromiseError):
        loop.add(request("unknown", range(22), salt="unknown", max_tokens=4, arrival_s=loop.now_s, level="strict"))
    again = loop.add(request("again", range(22), max_tokens=4, arrival_s=loop.now_s, level="strict"))[0]
    loop.run()
    assert again.timing.cached_tokens == 20


@pytest.mark.parametrize("with_disk", [False, True])
def test_who_loses_its_kv_costs_less_where_tiers_hold_it(tmp_path: Path, with_disk: bool) -> None:
    """Two have read as much; of one all but the last tokens came from a tier, and are there still."""
    kv_layout = layout((None, 24))
    disk = disk_tier(tmp_path, kv_layout) if with_disk else None
    loop = Loop(kv_layout, host_slots=30, disk=disk, step_seconds=lambda work: float(work.num_tokens))
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    for name in ("other", "third", "fourth"):
        evict(loop, name)
    kept = loop.add(request("again", range(22), max_tokens=9))[0]
    fresh = loop.add(request("fresh", range(22), salt="nobody's", max_tokens=9))[0]
    while not (kept.num_output and fresh.num_output):
        loop.turn()
    scheduler = loop.scheduler
    assert kept.timing.cached_tokens == 20
    prices = [loss(one, scheduler._forecast, scheduler.ledger, loop.now_s)[1] for one in (kept, fresh)]
    held, load_s = scheduler.ledger.num_coming_back(kept)
    assert held == 20 and prices[0] == pytest.approx(load_s + len(kept.tokens) - 20)
    assert prices[1] == pytest.approx(len(fresh.tokens)) and prices[0] < prices[1]
    loop.run()
    loop.check_outputs()


def test_no_salt_finds_what_another_left() -> None:
    loop = Loop(layout((None, 10)), host_slots=20)
    loop.add(request("first", range(22), salt="a", max_tokens=4))
    loop.run()
    evict(loop)
    again = loop.add(request("again", range(22), salt="b", max_tokens=4))[0]
    loop.run()
    assert (again.timing.cached_tokens, again.timing.tier_tokens) == (0, TierTokens())


def test_what_no_request_may_share_is_not_kept() -> None:
    """Prefixes of a request alone: its name could be another's after a restart."""
    loop = Loop(layout((None, 10)), host_slots=20, prefix_caching=False)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    tiers = loop.scheduler.ledger.tiers
    assert tiers is not None and not len(tiers.host)


def test_clearing_forgets_every_tier(tmp_path: Path) -> None:
    disk = disk_tier(tmp_path, layout((None, 10)))
    loop = Loop(layout((None, 10)), host_slots=20, disk=disk)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    tiers = loop.scheduler.ledger.tiers
    assert tiers is not None and tiers._threads is not None
    tiers._threads.flush(10.0)
    assert len(disk) and len(tiers.host)
    loop.scheduler.clear_prefixes()
    assert not len(disk) and not len(tiers.host) and not list(tmp_path.glob("*.kvsegment"))
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    loop.run()
    assert again.timing.cached_tokens == 0
    loop.check_outputs()
    tiers.close()


@pytest.mark.parametrize("kv_layout", [layout((None, 10)), WINDOWED])
def test_a_new_engine_finds_on_disk_what_an_old_one_left(tmp_path: Path, kv_layout: KVLayout) -> None:
    for name, tokens in (("first", 0), ("again", 20)):
        disk = disk_tier(tmp_path, kv_layout)
        loop = Loop(kv_layout, host_slots=30, disk=disk)
        sequence = loop.add(request(name, range(22), max_tokens=4))[0]
        loop.run()
        assert sequence.timing.tier_tokens == TierTokens(0, tokens)
        evict(loop)
        tiers = loop.scheduler.ledger.tiers
        assert tiers is not None and tiers._threads is not None
        tiers._threads.flush(10.0)
        tiers.settle()
        tiers.check()
        tiers.close()
        loop.check_outputs()


@pytest.mark.parametrize("kv_layout", [layout((None, 30)), layout((None, 30), (5, 30))])
@pytest.mark.parametrize(("host_slots", "num_tokens"), [(60, 80), (20, 80), (10, 40)])
def test_one_request_may_fetch_as_much_as_host_memory_holds(
    tmp_path: Path, kv_layout: KVLayout, host_slots: int, num_tokens: int
) -> None:
    prompt = [number % 30 for number in range(82)]
    for round_number, slots in ((0, 60), (1, host_slots)):
        loop = Loop(kv_layout, host_slots=slots, disk=disk_tier(tmp_path, kv_layout), max_context=128)
        sequence = loop.add(request("same", prompt, max_tokens=4))[0]
        loop.run()
        if round_number:
            assert sequence.timing.tier_tokens == TierTokens(0, num_tokens)
        else:
            for salt in ("a", "b"):
                loop.add(request(salt, [number % 29 for number in range(82)], salt=salt, max_tokens=20))
                loop.run()
        tiers = loop.scheduler.ledger.tiers
        assert tiers is not None and tiers._threads is not None
        assert tiers._threads.flush(10.0)
        tiers.settle()
        tiers.check()
        tiers.close()
        loop.check_outputs()


def test_last_writes_begin_with_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of each group in turn."""
    kv_layout = layout((None, 10), (None, 10))
    disk = disk_tier(tmp_path, kv_layout)
    loop = Loop(kv_layout, host_slots=20, disk=disk)
    monkeypatch.setattr(KVTiers, "_write", lambda tiers, kept: None)  # the disk is behind
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    tiers = loop.scheduler.ledger.tiers
    assert tiers is not None and not len(disk)
    oldest = next(tiers.host.kept())
    tiers.host.touch(oldest)
    tiers.write_kept(time.monotonic() + 10.0)
    written = [(name, group) for name, group in disk._records]
    assert len(written) == len(tiers.host) > 4
    assert written[0] == (oldest.node.digest, 0)
    assert [group for _, group in written[:4]] == [0, 1, 0, 1]
    tiers.close()


def test_computing_is_chosen_where_it_is_predicted_to_be_faster() -> None:
    class Slow(Worth):
        def may_spill(self, seconds: float) -> bool:
            return True

    for prefill_s, cached in ((1e-9, 0), (1e9, 20)):
        loop = Loop(layout((None, 10)), host_slots=20, worth=Slow(lambda start, tokens, s=prefill_s: s))
        loop.add(request("first", range(22), max_tokens=4))
        loop.run()
        evict(loop)
        again = loop.add(request("again", range(22), max_tokens=4))[0]
        loop.run()
        assert again.timing.cached_tokens == cached
        assert loop.scheduler.ledger.tiers.totals.recomputed_tokens == 20 - cached  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["host", "disk", "host and disk"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_computed_although_a_tier_has_it_is_counted_once(tmp_path: Path, where: str, waits: bool) -> None:
    """The tiers are asked when a request arrives, and in each step in which it is first in line."""
    kv_layout = layout((None, 10))
    for round_number in range(2 if where == "disk" else 1):
        disk = disk_tier(tmp_path, kv_layout) if "disk" in where else None
        loop = Loop(kv_layout, host_slots=30, disk=disk, max_running=1)
        if round_number == 0:
            loop.add(request("first", range(22), max_tokens=4))
            loop.run()
            evict(loop)
        tiers = loop.scheduler.ledger.tiers
        assert tiers is not None
        if tiers._threads is not None and round_number == 0:
            assert tiers._threads.flush(10.0)
            tiers.settle()
        if where == "disk" and round_number == 0:
            tiers.close()
    tiers.worth._prefill_seconds = lambda start, num_tokens: 0.0
    if waits:
        loop.add(request("before", range(9), salt="before", max_tokens=6))
        loop.turn()
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    loop.run()
    assert again.timing.cached_tokens == 0
    assert tiers.totals.recomputed_tokens == 20
    tiers.close()


def test_spilling_stops_where_it_would_slow_decode_and_goes_on_later() -> None:
    worth = Worth()
    assert worth.may_spill(10.0)
    assert not worth.may_spill(1e-9), "what a burst may take is used up"
    for _ in range(100):
        worth.step_took(1.0, has_decodes=True)
    assert not worth.may_spill(1e-9)
    for _ in range(300):
        worth.step_took(1.0, has_decodes=False)
    assert worth.may_spill(1e-9)


def test_blocks_come_while_others_decode() -> None:
    """Where loads take some turns, whoever decodes has them meanwhile, and its own first chunk waits."""
    loop = Loop(layout((None, 20)), host_slots=30, bytes_per_s=30.0, max_running=4)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    loop.add(request("other", range(28), salt="other", max_tokens=30))
    loop.add(request("third", range(5, 30), salt="third", max_tokens=30))
    loop.run()
    loop.add(request("stream", range(9), salt="stream", max_tokens=40))
    for _ in range(6):
        loop.turn()
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    first = next(step for step in iter(loop.move, None) if step.loads)
    assert first.decodes and not first.joins and not first.prefills
    later = next(step for step in iter(loop.move, None) if step.prefills)
    assert later.step_id > first.step_id + 1 and later.decodes
    loop.run()
    loop.check_outputs()
    assert again.timing.tier_tokens.host == 20


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_whoever_ends_while_its_blocks_come_leaves_no_row_and_no_pin(reason: FinishReason) -> None:
    loop = Loop(layout((None, 12)), host_slots=30, bytes_per_s=1.0)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    loop.add(request("stream", range(3), salt="stream", max_tokens=20))
    loop.turn()
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    assert any(step.loads for step in iter(loop.move, None))
    assert loop.scheduler.finish(again, reason)
    loop.run()
    loop.check_outputs()


def test_a_step_that_was_never_launched_hands_its_loads_on_and_gives_its_spills_up() -> None:
    """A backend may have made its copies, and written over what was spilled, before it raised: a second copy would be
    kept under the name of the first."""
    loop = Loop(layout((None, 10)), host_slots=20)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    evict(loop)
    loop.add(request("lost", range(22), max_tokens=4))
    step = loop.scheduler.schedule(loop.now_s)
    assert step is not None and step.loads and step.spills
    tiers = loop.scheduler.ledger.tiers
    assert tiers is not None
    spilled = [(kept.group, kept.slot) for kept in tiers.host.kept()]
    assert all((copy.group, copy.slot) in spilled for copy in step.spills)
    loop.scheduler.fail(step, "it did not start", loop.now_s, launched=False)
    loop.scheduler.check()
    kept_slots = [(kept.group, kept.slot) for kept in tiers.host.kept()]
    assert not any((copy.group, copy.slot) in kept_slots for copy in step.spills), "nobody finds what may not be there"
    again = loop.scheduler
    loop.backend.steps.append(step)  # so that the next one's number follows
    loop.add(request("again", [7, *range(20)], max_tokens=4))
    following = again.schedule(loop.now_s)
    assert following is not None
    assert following.loads[: len(step.loads)] == step.loads
    assert not {copy[:2] for copy in step.spills} & {copy[:2] for copy in following.spills}
    loop.in_flight.append((following, loop.backend.launch(following)))
    loop.run()
    loop.check_output(next(one for one in loop.records if one.request.request_id == "again"))


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_whoever_was_to_be_given_blocks_by_a_step_that_raised_does_not_rely_on_them(runs_ahead: bool) -> None:
    """It has no work in that step. It begins again, or ends where a step behind has read what never came."""
    loop = Loop(layout((None, 20)), host_slots=30, bytes_per_s=30.0 if not runs_ahead else 1e9, max_running=4)
    loop.add(request("first", range(22), max_tokens=4))
    loop.run()
    loop.add(request("other", range(28), salt="other", max_tokens=30))
    loop.add(request("third", range(5, 30), salt="third", max_tokens=30))
    loop.run()
    stream = loop.add(request("stream", range(9), salt="stream", max_tokens=40))[0]
    for _ in range(6):
        loop.turn()
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    step = loop.scheduler.schedule(loop.now_s)
    assert step is not None and step.loads and again.seq_id not in {chunk.seq_id for chunk in step.prefills}
    loop.backend.steps.append(step)
    loop.backend._update_rows(replace(step, decodes=(), prefills=(), grants=(), spills=(), loads=()))
    behind = None
    if runs_ahead:
        loop.now_s += 100.0
        behind = loop.scheduler.schedule(loop.now_s)
        assert behind is not None and again.seq_id in {chunk.seq_id for chunk in behind.prefills}
    loop.scheduler.fail(step, "it raised before its copies were made", loop.now_s)
    assert stream.finish_reason is FinishReason.ERROR
    if behind is not None:
        assert again.finish_reason is FinishReason.ERROR
        return
    assert (again.state, again.num_computed) == (SequenceState.WAITING, 0)
    loop.scheduler.check()
    loop.run()
    loop.check_output(again)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_whoever_a_grammar_left_without_a_token_leaves_its_kv_to_others(is_stuck: bool) -> None:
    """Nothing was computed wrongly. After any other error nobody finds it."""
    loop = Loop(layout((None, 20)), host_slots=20)
    sequence = loop.add(request("first", range(22), max_tokens=4))[0]
    loop.move()
    step = loop.launch()
    assert step is not None
    _, ticket = loop.in_flight.popleft()
    error, stuck = {sequence.seq_id: "no token may follow"}, frozenset([sequence.seq_id] if is_stuck else [])
    loop.scheduler.apply(step, replace(ticket.result(), sampled={}, errors=error, stuck=stuck), loop.now_s)
    assert sequence.finish_reason is FinishReason.ERROR
    again = loop.add(request("again", range(22), max_tokens=4))[0]
    loop.run()
    assert again.timing.cached_tokens == (20 if is_stuck else 0)
    loop.check_output(again)


def test_two_engines_over_one_folder_say_what_each_says_alone(tmp_path: Path) -> None:
    """In turns, in a folder too small for both, one of them clearing it now and then; the second round finds what the
    first left."""
    generator, from_disk = random.Random(9), 0
    for _ in range(2):
        loops = []
        for _ in range(2):
            disk = disk_tier(tmp_path, WINDOWED, limit_bytes=12_000)
            loops.append(Loop(WINDOWED, host_slots=6, disk=disk, depth=1))
        for number in range(40):
            loop = generator.choice(loops)
            prompt = [generator.randint(0, 2), *range(generator.randint(3, 24))]
            loop.add(request(f"r{number}", prompt, max_tokens=generator.randint(1, 6)))
            for _ in range(generator.randint(0, 9)):
                generator.choice(loops).turn()
            if generator.random() < 0.03:
                loop.scheduler.clear_prefixes()
        for loop in loops:
            loop.run()
            loop.check_outputs()
            from_disk += sum(sequence.timing.tier_tokens.disk for sequence in loop.records)
            tiers = loop.scheduler.ledger.tiers
            assert tiers is not None
            tiers.close()
    assert from_disk > 0


def test_a_long_prefix_is_found_in_time_that_grows_with_its_length() -> None:
    """Names that host memory has are adopted: each block is compared in one step, not along its whole prefix."""
    looked_at = [0]

    class Counted(tuple[int, ...]):
        def __ne__(self, other: object) -> bool:
            looked_at[0] += 1
            return tuple(self) != other

        __hash__ = tuple.__hash__

    loop = Loop(layout((None, 420), block_size=1), host_slots=900, max_context=400, max_tokens_per_step=400)
    loop.add(request("first", [number % 32 for number in range(390)], max_tokens=4))
    loop.run()
    loop.add(request("other", [number % 31 for number in range(390)], salt="other", max_tokens=9))
    loop.run()
    tiers = loop.scheduler.ledger.tiers
    assert tiers is not None
    for kept in tiers.host.kept():
        kept.node.tokens = Counted(kept.node.tokens)
    again = loop.add(request("again", [number % 32 for number in range(390)], max_tokens=4))[0]
    loop.run()
    assert again.timing.tier_tokens.host > 300
    assert 300 < looked_at[0] < 5_000
    loop.check_outputs()


def test_random_work_over_a_real_disk(tmp_path: Path) -> None:
    """Engines one after the other over one folder, some of it damaged between two: every answer is right, and some of
    what was read came from disk."""
    generator, from_disk = random.Random(3), 0
    for round_number in range(6):
        kv_layout = WINDOWED
        disk = disk_tier(tmp_path, kv_layout, limit_bytes=40_000)
        loop = Loop(kv_layout, host_slots=generator.choice([4, 12]), disk=disk, depth=generator.randint(0, 2), drafts=3)
        for number in range(25):
            prompt = [generator.randint(0, 2), *range(generator.randint(3, 24))]
            loop.add(request(f"r{number}", prompt, max_tokens=generator.randint(1, 8), n=generator.choice([1, 1, 2])))
            for _ in range(generator.randint(0, 9)):
                loop.turn()
            if generator.random() < 0.1:
                loop.scheduler.abort(f"r{number}")
        loop.run()
        loop.check_outputs()
        from_disk += sum(sequence.timing.tier_tokens.disk for sequence in loop.records)
        tiers = loop.scheduler.ledger.tiers
        assert tiers is not None and tiers._threads is not None
        tiers._threads.flush(10.0)
        tiers.close()
        for path in tmp_path.glob("*.kvsegment"):
            if round_number % 2 and generator.random() < 0.5:
                damaged = bytearray(path.read_bytes())
                damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
                path.write_bytes(damaged)
    assert from_disk > 0
