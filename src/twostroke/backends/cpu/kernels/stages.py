"""How the tape is run: stage by stage, the pieces of a stage dealt to whoever is running. A thread takes the pieces of
its own part first, then those of threads that are behind; a thread that the system keeps from running delays others by
the piece it has in hand, and by nothing else. What a thread may touch it has claimed before: who comes late to a
stage, or to a step, finds nothing to claim."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from twostroke.backends.cpu.arguments import (
    FEW_ROWS,
    POOL_LINE,
    WORD_COUNT_BITS,
    WORD_STAGE_BITS,
    LineField,
    PoolField,
    StepField,
    TapeField,
    TimeField,
    Wait,
)
from twostroke.backends.cpu.kernels.emitter import I64, POINTER, VOID, Emitter, Value
from twostroke.backends.cpu.kernels.operation import PARAMETERS, rows_stay
from twostroke.backends.cpu.kernels.sleeping import wait_until, wake_sleepers

SPINS_BEFORE_SLEEP = 10000
"""Some 250 microseconds: longer than a piece, far shorter than the turn of another program on a thread's core."""
_COUNT_MASK = (1 << WORD_COUNT_BITS) - 1
_PREFIX_SHIFT = 2 * WORD_COUNT_BITS

_STAGE_PARAMETERS = (
    ("pool", POINTER),
    ("tape", POINTER),
    ("first", I64),
    ("last", I64),
    ("own", I64),
    ("part", I64),
    ("parts", I64),
    ("thread", I64),
    ("threads", I64),
)


def emit_stages(e: Emitter) -> None:
    _emit_next_piece(e)
    _emit_run_entries(e)
    _emit_run_tape(e)


def pool_field(e: Emitter, pool: Value, field: PoolField) -> Value:
    return e.load_at(I64, pool, int(field))


def line_pointer(e: Emitter, pool: Value, thread: Value, field: LineField) -> Value:
    return e.atomic_pointer(pool, e.add(e.mul(thread, POOL_LINE), int(PoolField.LINES) + int(field)))


def _entry_field(e: Emitter, tape: Value, index: Value, field: TapeField) -> Value:
    return e.load_at(I64, tape, e.add(e.mul(index, len(TapeField)), int(field)))


def _emit_next_piece(e: Emitter) -> None:
    """The number of a piece of `owner`'s part that nobody had claimed, or -1. `finished`: 1 where the caller has done
    the piece that it claimed before, which is noted in the same breath."""
    parameters = (("pool", POINTER), ("owner", I64), ("base", I64), ("pieces", I64), ("finished", I64))
    with e.function("next_piece", parameters, result=I64) as (pool, owner, base, pieces, finished):
        build = e.build
        word = line_pointer(e, pool, owner, LineField.WORD)
        seen = e.variable(I64, build.load_atomic(word, "acquire", 8, typ=I64))
        attempt, swap, taken, none = (build.append_basic_block(name) for name in ("attempt", "swap", "taken", "none"))
        build.branch(attempt)
        build.position_at_end(attempt)
        # A word of an earlier stage is one of this stage that nobody has begun; one of a later stage, and this
        # caller has come too late.
        begun = e.add(e.larger(seen.value, base), finished)
        claimed = build.and_(build.lshr(begun, e.integer(WORD_COUNT_BITS)), e.integer(_COUNT_MASK))
        is_late = build.icmp_signed("!=", build.lshr(begun, e.integer(_PREFIX_SHIFT)), _prefix(e, base))
        takes = build.and_(build.not_(is_late), build.icmp_signed("<", claimed, pieces))
        wanted = e.add(begun, build.select(takes, e.integer(1 << WORD_COUNT_BITS), e.integer(0)))
        unchanged = build.and_(build.not_(takes), build.icmp_signed("==", finished, e.integer(0)))
        build.cbranch(unchanged, none, swap)
        build.position_at_end(swap)
        result = build.cmpxchg(word, seen.value, wanted, "seq_cst", "acquire")
        seen.value = build.extract_value(result, 0)
        build.cbranch(build.extract_value(result, 1), taken, attempt)
        build.position_at_end(taken)
        done = build.and_(wanted, e.integer(_COUNT_MASK))
        with e.when(build.icmp_signed("==", done, pieces)):
            wake_sleepers(e, pool)
        build.ret(build.select(takes, claimed, e.integer(-1)))
        build.position_at_end(none)
        build.ret(e.integer(-1))


def _prefix(e: Emitter, word: Value) -> Value:
    return e.build.lshr(word, e.integer(_PREFIX_SHIFT))


def _clock(e: Emitter) -> Value:
    """The counter that runs at one rate on all cores."""
    name = "llvm.readcyclecounter" if e.isa.architecture == "x86_64" else "llvm.readsteadycounter"
    return e.external(name, I64, [], [])


class _Clock:
    """Notes times where they are wanted."""

    def __init__(self, e: Emitter, pool: Value, thread: Value) -> None:
        self._e, self._thread = e, thread
        self._times = pool_field(e, pool, PoolField.TIMES)
        self._length = pool_field(e, pool, PoolField.TAPE_LENGTH)
        self.is_wanted = e.is_nonzero(self._times)

    def note(self, index: Value, *fields: TimeField) -> None:
        e = self._e
        with e.when(self.is_wanted):
            now = _clock(e)
            entry = e.mul(e.add(e.mul(self._length, self._thread), index), len(TimeField))
            for field in fields:
                e.store(now, e.at(e.pointer(self._times), e.add(entry, int(field)), I64), 8)


def _emit_run_entries(e: Emitter) -> None:
    """One piece of the stage from entry `first` to `last`: a part of each operation. With `own`, those operations
    instead that every thread does for itself."""
    with e.function("run_entries", _STAGE_PARAMETERS) as values:
        pool, tape, first, last, own, part, parts, thread, threads = values
        build = e.build
        scratch_bytes = pool_field(e, pool, PoolField.SCRATCH_BYTES)
        scratch = e.at(e.pointer(pool_field(e, pool, PoolField.SCRATCH)), e.mul(scratch_bytes, thread))
        step = e.pointer(pool_field(e, pool, PoolField.STEP))
        kind = ir.FunctionType(VOID, [kind for _, kind in PARAMETERS])
        clock = _Clock(e, pool, thread)
        with e.loop(first, e.add(last, 1)) as index:
            is_own = build.icmp_signed("==", _entry_field(e, tape, index, TapeField.PIECES), e.integer(0))
            with e.when(build.icmp_signed("==", is_own, e.is_nonzero(own))):
                clock.note(index, TimeField.BEGIN)
                function = build.inttoptr(_entry_field(e, tape, index, TapeField.FUNCTION), kind.as_pointer())
                arguments = e.pointer(_entry_field(e, tape, index, TapeField.ARGUMENTS))
                build.call(function, [arguments, step, part, parts, thread, threads, scratch])
                clock.note(index, TimeField.DONE, TimeField.LEAVE)


def _emit_run_tape(e: Emitter) -> None:
    """All stages of the step that `go` names, or nothing where that step is over."""
    with e.function("run_tape", (("pool", POINTER), ("thread", I64), ("go", I64))) as (pool, thread, go):
        build = e.build
        tape, length = e.pointer(pool_field(e, pool, PoolField.TAPE)), pool_field(e, pool, PoolField.TAPE_LENGTH)
        threads = pool_field(e, pool, PoolField.THREADS)
        step = e.pointer(pool_field(e, pool, PoolField.STEP))
        rows, logits = (e.load_at(I64, step, int(field)) for field in (StepField.NUM_TOKENS, StepField.NUM_LOGITS))
        stay = rows_stay(e, rows, threads)
        is_few = build.icmp_signed("<", rows, e.integer(FEW_ROWS))
        is_timed = e.is_nonzero(pool_field(e, pool, PoolField.TIMES))
        fixed = build.or_(build.or_(stay, rows_stay(e, logits, threads)), build.or_(build.not_(is_few), is_timed))
        # What was read until here is of this step only if no other has begun meanwhile.
        build.fence("acquire")
        current = build.load_atomic(e.atomic_pointer(pool, int(PoolField.GO)), "acquire", 8, typ=I64)
        takes_part = build.icmp_signed("<", thread, threads)
        with e.when(build.and_(build.icmp_signed("==", current, go), takes_part)):
            needless = build.select(stay, e.integer(int(Wait.UNLESS_ROWS_STAY)), e.integer(int(Wait.NEVER)))
            alone = build.icmp_signed("==", threads, e.integer(1))
            with build.if_else(alone) as (one, several):
                with one:
                    _run_alone(e, pool, tape, length, thread)
                with several:
                    number = build.lshr(go, e.integer(1))
                    _Stages(e, pool, tape, length, thread, threads, number, needless, fixed).run()


def _run_alone(e: Emitter, pool: Value, tape: Value, length: Value, thread: Value) -> None:
    """One thread has nobody to deal with."""
    none, one = e.integer(0), e.integer(1)
    with e.loop(0, length) as index:
        for own in (one, none):
            e.call("run_entries", [pool, tape, index, index, own, none, one, thread, one])


class _Stages:
    def __init__(
        self,
        e: Emitter,
        pool: Value,
        tape: Value,
        length: Value,
        thread: Value,
        threads: Value,
        number: Value,
        needless: Value,
        fixed: Value,
    ) -> None:
        """`needless`: the kind of wait that is none in this step; `fixed`: whether parts are cut as for many rows."""
        self._e, self._pool, self._tape, self._length = e, pool, tape, length
        self._thread, self._threads, self._number = thread, threads, number
        self._needless, self._fixed = needless, fixed
        self._clock = _Clock(e, pool, thread)

    def run(self) -> None:
        e, build = self._e, self._e.build
        first, last = e.variable(I64, e.integer(0)), e.variable(I64)
        with _repeat(e, lambda: build.icmp_signed("<", first.value, self._length)):
            last.value = first.value
            with _repeat(e, lambda: build.not_(self._waits_after(last.value))):
                last.value = e.add(last.value, 1)
            self._run_stage(first.value, last.value)
            first.value = e.add(last.value, 1)

    def _waits_after(self, index: Value) -> Value:
        build = self._e.build
        wait = _entry_field(self._e, self._tape, index, TapeField.WAIT)
        never = build.icmp_signed("==", wait, self._e.integer(int(Wait.NEVER)))
        return build.not_(build.or_(never, build.icmp_signed("==", wait, self._needless)))

    def _run_stage(self, first: Value, last: Value) -> None:
        e, build = self._e, self._e.build
        cut, whole = (
            _entry_field(e, self._tape, last, field) for field in (TapeField.PIECES, TapeField.PIECES_OF_MANY)
        )
        pieces = build.select(self._fixed, whole, cut)
        pieces = build.select(self._clock.is_wanted, e.integer(1), pieces)  # a later piece would write over its times
        prefix = build.or_(build.shl(self._number, e.integer(WORD_STAGE_BITS)), first)
        base = build.shl(prefix, e.integer(_PREFIX_SHIFT))
        with e.loop(first, e.add(last, 1)) as index:
            self._clock.note(index, *TimeField)  # for who finds no piece
        self._do_pieces(first, last, base, pieces)
        complete = e.add(base, pieces)
        with e.loop(0, self._threads) as owner:
            word = line_pointer(e, self._pool, owner, LineField.WORD)
            wait_until(e, self._pool, lambda: self._is_complete(word, complete), SPINS_BEFORE_SLEEP)
        self._clock.note(last, TimeField.LEAVE)

    def _is_complete(self, word: Value, complete: Value) -> Value:
        """All pieces are done (the counts of done ones are the word's last bits), or another stage has begun."""
        e, build = self._e, self._e.build
        found = build.load_atomic(word, "acquire", 8, typ=I64)
        later = build.icmp_signed(">", _prefix(e, found), _prefix(e, complete))
        same = build.icmp_signed("==", _prefix(e, found), _prefix(e, complete))
        done, pieces = (build.and_(value, e.integer(_COUNT_MASK)) for value in (found, complete))
        return build.or_(later, build.and_(same, build.icmp_signed("==", done, pieces)))

    def _do_pieces(self, first: Value, last: Value, base: Value, pieces: Value) -> None:
        e, build = self._e, self._e.build
        thread, threads = self._thread, self._threads
        prepared, piece = e.variable(I64, e.integer(0)), e.variable(I64)

        def run_entries(own: int, part: Value, parts: Value) -> None:
            stage = [self._pool, self._tape, first, last]
            e.call("run_entries", [*stage, e.integer(own), part, parts, thread, threads])

        def take(owner: Value, finished: int) -> None:
            piece.value = e.call("next_piece", [self._pool, owner, base, pieces, e.integer(finished)])

        with e.loop(0, threads) as distance:
            owner = e.rem(e.add(thread, distance), threads)
            take(owner, 0)
            with _repeat(e, lambda: build.icmp_signed(">=", piece.value, e.integer(0))):
                with e.when(build.icmp_signed("==", prepared.value, e.integer(0))):
                    run_entries(1, thread, threads)
                    prepared.value = e.integer(1)
                run_entries(0, e.add(e.mul(owner, pieces), piece.value), e.mul(threads, pieces))
                take(owner, 1)


class _repeat:  # noqa: N801  (reads as a statement)
    """while condition(): the body"""

    def __init__(self, e: Emitter, condition: Callable[[], Value]) -> None:
        self._e, self._condition = e, condition

    def __enter__(self) -> None:
        build = self._e.build
        self._check = build.append_basic_block("check")
        body, self._after = build.append_basic_block("body"), build.append_basic_block("behind")
        build.branch(self._check)
        build.position_at_end(self._check)
        build.cbranch(self._condition(), body, self._after)
        build.position_at_end(body)

    def __exit__(self, *_: object) -> None:
        self._e.build.branch(self._check)
        self._e.build.position_at_end(self._after)
