"""The engine's own process: `python -m twostroke.server.engine_process SOCKET HEART`, settings on standard input. It
steps the engine, takes requests between steps, and sends what each step brought in one message; HEART is a pipe that it
beats into. It ends when its standard input closes, so it never outlives the API process. Knows no HTTP."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import msgspec
import zmq

from twostroke.cluster.demand import LevelSignals
from twostroke.cluster.endpoints import read_endpoint
from twostroke.cluster.kv_events import KVEventPublisher, KVEvents
from twostroke.core.errors import BackendLostError, BadRequestError, PromiseError, TwostrokeError
from twostroke.core.events import Event, PrefillProgress, TokenEvent, VectorEvent
from twostroke.core.request import Request
from twostroke.core.step import Step, StepResult
from twostroke.cost.floor import work_of
from twostroke.cost.trust import doubt_of
from twostroke.engine.build import Assembly, build
from twostroke.engine.drafting import drafter_states
from twostroke.engine.explaining import engine_facts, trusted_cost
from twostroke.engine.tiers import tier_report
from twostroke.server import messages as m
from twostroke.server.heartbeat import Doing, Heart
from twostroke.server.log import log, show_what_rooms_say
from twostroke.server.step_watch import StepWatch

Noted = TypeVar("Noted")

BUSY_STATS_S = 0.5
IDLE_STATS_S = 5.0
LONGEST_WAIT_S = 0.5
LINGER_MS = 2000
LOST = 4
"""The status that it ends with when its backend cannot go on."""
COMPILING_POLL_MS = 2
"""An idle engine looks this often whether a grammar is ready."""


class EngineLoop:
    def __init__(
        self,
        assembly: Assembly,
        socket: zmq.Socket[bytes],
        heart: Heart,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        self._assembly = assembly
        self._engine = assembly.engine
        self._eos_ids = assembly.tokenizer.eos_token_ids if assembly.tokenizer is not None else frozenset()
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if (handing := self._engine.scheduler.ledger.handing) is not None:
            self._poller.register(handing.bell.fileno(), zmq.POLLIN)
        self._stopped = False
        self._was_busy = True
        self._stats_due_s = 0.0
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiling: dict[str, tuple[Request, Future[object]]] = {}
        """Requests whose grammar is compiled beside the steps, in the order they came."""
        self._steps = {kind: m.StepHistogram([0] * (len(m.STEP_BUCKETS_S) + 1)) for kind in m.STEP_KINDS}
        self._drafts: dict[str, m.DraftCounts] = {}
        self._engine.on_step = self._count_step
        self._engine.on_launch = self._announce
        self._heart = heart
        self._kv_events = kv_events
        self._levels = assembly.resolved.config.promised()
        self._watch: StepWatch | None = None
        """While somebody watches."""
        self._is_held = False
        self._granted = 0
        """Steps that a held engine may still take."""

    def run(self) -> None:
        heart = self._heart
        heart.doing = Doing.WAITING
        heart.beat()
        while True:
            heart.moves += 1
            self._take_messages()
            self._add_compiled()
            if self._stopped:
                self._compiler.shutdown(wait=False, cancel_futures=True)
                return
            self._tell_seen()  # who has come, before a word of its end: it may come and end in one turn
            self._tell(self._engine.take_events())  # a first token that came with its prompt waits for no step
            if self._may_step():
                heart.doing = Doing.STEPPING
                self._tell(self._engine.step())
                if self._engine.lost is not None:
                    raise self._engine.lost
            else:
                heart.doing = Doing.WAITING
                self._engine.scheduler.settle_tiers()
                self._tell(self._engine.take_events())
            self._tell_seen()
            if self._kv_events is not None:
                self._kv_events.publish()
            self._send_stats()

    def _may_step(self) -> bool:
        """A held engine takes the steps that it is granted, after those in flight. With nothing to do they are void."""
        if not self._engine.busy:
            self._granted = 0
        if not self._engine.busy or self._stands_still:
            return False
        if self._is_held and not self._engine.num_in_flight:
            self._granted -= 1
        return True

    @property
    def _stands_still(self) -> bool:
        return self._is_held and not self._granted and not self._engine.num_in_flight

    def _take_messages(self) -> None:
        """All that is there; an engine that is idle or held waits for the next, or for a word of another engine."""
        is_idle = not self._engine.busy or self._stands_still
        wait_s = max(0.0, self._stats_due_s - time.monotonic()) if is_idle else 0.0
        if self._watch is not None and (map_in_s := self._watch.map_due_in_s) is not None:
            wait_s = min(wait_s, map_in_s + 1e-3)
        wait_ms = int(min(wait_s, LONGEST_WAIT_S) * 1e3)  # it shows that it moves, however little there is to do
        if self._compiling:
            wait_ms = min(wait_ms, COMPILING_POLL_MS)
        if wait_ms and not m.has_message(self._socket):
            self._poller.poll(wait_ms)
        while not self._stopped and m.has_message(self._socket):
            self._handle(m.decode_to_engine(self._socket.recv()))

    def _handle(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Add):
            self._add(message.request)
        elif isinstance(message, m.Abort):
            for request_id in message.request_ids:
                if (compiling := self._compiling.pop(request_id, None)) is not None:
                    compiling[1].cancel()
                self._engine.abort(request_id)
            self._note(StepWatch.released)
        elif isinstance(message, m.Watch):
            self._watch = None
            if message.is_on:
                self._begin_watching()
        elif isinstance(message, m.Hold):
            self._is_held, self._granted = message.is_held, 0
            self._engine.run_ahead(not message.is_held)
        elif isinstance(message, m.Grant):
            self._granted += message.steps
        else:
            self._stopped = True

    def _add(self, request: Request) -> None:
        """A grammar that is not there yet is compiled first, while the others' steps go on."""
        grammar, grammars = request.sampling.grammar, self._assembly.grammars
        if grammar is None or grammars is None or grammars.is_compiled(grammar):
            self._add_to_engine(request)
        else:
            self._compiling[request.request_id] = request, self._compiler.submit(grammars.check, grammar)

    def _add_compiled(self) -> None:
        for request_id, (request, compiled) in list(self._compiling.items()):
            if compiled.done():
                self._add_to_engine(request, compiled)
                del self._compiling[request_id]

    def _add_to_engine(self, request: Request, compiled: Future[object] | None = None) -> None:
        request_id = request.request_id
        try:
            if compiled is not None:
                compiled.result()
            self._engine.add(replace(request, eos_token_ids=self._eos_ids))
            self._note(lambda watch: watch.added(request))
        except BadRequestError as error:
            self._send(m.Refused(request_id, str(error)))
        except PromiseError as error:
            self._send(m.Refused(request_id, str(error), retry_after_s=error.retry_after_s))
        except Exception as error:  # a bug, and this request's alone
            log(f"request {request_id} could not be added: {type(error).__name__}: {error}")
            self._send(m.Refused(request_id, "the engine could not take this request", is_bad_request=False))

    def _tell(self, events: list[Event]) -> None:
        outputs = [event for event in events if isinstance(event, TokenEvent)]
        progress = [event for event in events if isinstance(event, PrefillProgress)]
        vectors = [event for event in events if isinstance(event, VectorEvent)]
        if progress or outputs:
            self._send(m.StepOutputs(progress, outputs, vectors))

    def _tell_seen(self) -> None:
        goes_on = self._engine.busy and not self._is_held
        if events := self._note(lambda watch: watch.take(is_asked_again=goes_on)):
            self._send(m.Seen(events))

    def _note(self, note: Callable[[StepWatch], Noted]) -> Noted | None:
        """While somebody watches. What goes wrong there ends the watch, and no request."""
        if self._watch is None:
            return None
        try:
            return note(self._watch)
        except Exception as error:
            self._give_up_watching(error)
            return None

    def _begin_watching(self) -> None:
        try:
            self._watch = StepWatch(self._engine)
        except Exception as error:
            self._give_up_watching(error)

    def _give_up_watching(self, error: Exception) -> None:
        self._watch = None
        log(f"steps are not told to the live page any more: {type(error).__name__}: {error}")

    def _announce(self, step: Step) -> None:
        cost = self._engine.step_cost
        predicted_s = None if cost is None else cost.seconds(work_of(step))
        self._heart.launching(predicted_s or 0.0)
        self._note(lambda watch: watch.launched(step, predicted_s))

    def _count_step(self, step: Step, result: StepResult) -> None:
        kind = "mixed" if step.prefills and step.decodes else "prefill" if step.prefills else "decode"
        histogram = self._steps[kind]
        histogram.counts[bisect_left(m.STEP_BUCKETS_S, result.compute_s)] += 1
        histogram.total_s += result.compute_s
        for seq_id, (method, num_drafts) in result.drafted.items():
            if method not in self._drafts:
                self._drafts[method] = m.DraftCounts.empty()
            self._drafts[method].add(num_drafts, len(result.sampled.get(seq_id, ())))
        self._note(lambda watch: watch.came_back(step, result))

    def _send_stats(self) -> None:
        """When they are due, and at once when work begins or ends."""
        now_s, busy = time.monotonic(), self._engine.busy or self._engine.scheduler.ledger.is_leasing
        if now_s < self._stats_due_s and busy == self._was_busy:
            return
        self._was_busy = busy
        self._stats_due_s = now_s + (BUSY_STATS_S if busy else IDLE_STATS_S)
        counts = self._engine.scheduler.counts()
        last, cost = self._engine.step_log.last, trusted_cost(self._assembly)
        self._send(
            m.Stats(
                waiting=counts.waiting,
                running_prefill=counts.running_prefill,
                running_decode=counts.running_decode,
                prefill_backlog_tokens=counts.prefill_backlog_tokens,
                preemptions=counts.preemptions,
                prefix_hit_tokens=counts.prefix_hit_tokens,
                prefix_lookup_tokens=counts.prefix_lookup_tokens,
                blocks=tuple((group.free, group.cached, group.used) for group in counts.blocks),
                steps=self._steps,
                drafts=self._drafts,
                drafters=drafter_states(self._engine.backend),
                totals=None if last is None else last.totals,
                step_cost=None if cost is None else (cost.ceilings, cost.coefficients),
                step_cost_doubt=doubt_of(self._engine.step_cost),
                step_cost_error=self._engine.step_cost.error if self._engine.step_cost is not None else None,
                tiers=tier_report(counts),
                handoffs=None if counts.tiers is None else counts.tiers.handoffs,
                prefill_backlog_s=counts.prefill_backlog_s,
                kv_full_s=counts.kv_full_s,
                levels=tuple(
                    LevelSignals(
                        name=level.name,
                        waiting=level.waiting,
                        running=level.running,
                        prefill_backlog_s=level.prefill_backlog_s,
                        ttft_s=self._levels.named(level.name).ttft_s,
                        itl_s=self._levels.named(level.name).itl_s,
                        ttft_headroom_s=level.ttft_headroom_s,
                        itl_headroom_s=level.itl_headroom_s,
                    )
                    for level in counts.levels
                ),
            )
        )

    def _send(self, message: m.FromEngine) -> None:
        self._socket.send(m.encode(message))


def ready_message(assembly: Assembly) -> m.Ready:
    resolved, checkpoint = assembly.resolved, assembly.checkpoint
    room, pooling = assembly.engine.scheduler.ledger.max_total_tokens, checkpoint.pooling
    if room is not None and pooling is not None:
        room -= 1  # a vector counts as the token that follows a text
    return m.Ready(
        backend=assembly.backend_name,
        family=checkpoint.spec.family,
        num_parameters=checkpoint.num_parameters,
        weight_bytes=checkpoint.held_bytes(assembly.formats.weights),
        threads=resolved.threads,
        vocab_size=checkpoint.spec.vocab_size,
        max_context=resolved.max_context if room is None else min(resolved.max_context, room),
        engine=engine_facts(assembly),
        notes=assembly.notes,
        hidden_size=checkpoint.spec.hidden_size,
        file_format="safetensors" if checkpoint.gguf_metadata is None else "gguf",
        weight_kind=checkpoint.main_kind(assembly.formats.weights).name,
        kv_groups=resolved.layout.groups,
        levels=resolved.config.promised().levels,
        vectors=None if pooling is None else pooling.facts,
    )


def publish_kv_events(assembly: Assembly, settings: m.EngineSettings) -> KVEventPublisher | None:
    """None: nobody asked for them. Raises BackendError where an address cannot be had."""
    if settings.kv_events is None:
        return None
    ledger = assembly.engine.scheduler.ledger
    events = KVEvents(ledger.layout.groups, ledger.layout.block_size)
    publisher = KVEventPublisher(events, read_endpoint(settings.kv_events), settings.kv_events_topic)
    ledger.index.listener = events
    log(f"KV events: published at {publisher.endpoints.events}, repeated at {publisher.endpoints.replay}")
    return publisher


def main(path: str, heart_descriptor: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the API process, which drains first
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=m.EngineSettings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    show_what_rooms_say()
    heart = Heart(heart_descriptor)
    heart.start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)  # a step's tokens are never dropped, nor does a step wait for a busy API process
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(f"ipc://{path}")
    try:
        assembly = build(settings.model, settings.config, fleet=settings.fleet)
        # This process has one engine for life: the garbage collector need not look at it again while tokens wait.
        gc.collect()
        gc.freeze()
        kv_events = publish_kv_events(assembly, settings)
        socket.send(m.encode(ready_message(assembly)))
    except TwostrokeError as error:
        return _fail(socket, str(error))
    except MemoryError:
        return _fail(socket, "there is not enough memory for this model")
    if assembly.grammars is not None:  # now, as nobody waits yet: the first to ask would hold up every other stream
        threading.Thread(target=assembly.grammars.prepare, daemon=True).start()
    try:
        EngineLoop(assembly, socket, heart, kv_events).run()
    except BackendLostError as error:  # a new process may do better, and is started by the API process
        log(f"the engine ends: the {assembly.backend_name} backend is lost: {error}")
        return LOST
    finally:
        if kv_events is not None:
            kv_events.close()
        socket.close()
        assembly.engine.close()
    return 0


def _fail(socket: zmq.Socket[bytes], sentence: str) -> int:
    socket.send(m.encode(m.Failed(sentence)))
    socket.close()
    zmq.Context.instance().term()  # waits until it is sent
    return 2


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing more is ever written: this returns when the other end is gone
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
