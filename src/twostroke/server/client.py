"""The API's end of the pipe: starts the engine process, hands requests over, deals out what comes back, and starts the
engine again, later and later, when it dies. Knows no HTTP but the errors its callers are to see."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import zmq

from twostroke.core.errors import BackendError
from twostroke.core.handoff import Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.tier_secret import tier_secret
from twostroke.server import messages as m
from twostroke.server.errors import ApiError, engine_unavailable, server_stopped
from twostroke.server.heartbeat import HeartWatch
from twostroke.server.inbox import Inbox
from twostroke.server.log import log
from twostroke.server.mailroom import Mailroom
from twostroke.server.metrics import Metrics
from twostroke.server.restarts import Restarts
from twostroke.server.spawning import private_folder, start_process

if TYPE_CHECKING:
    from twostroke.server.tracing import Tracing
    from twostroke.server.watch_hub import WatchHub

LAST_WORDS_S = 0.2
STOP_LIMIT_S = 5.0
KILL_LIMIT_S = 10.0


class EngineState(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class Common(TypedDict, total=False):
    """Of a Request, what all of a call share."""

    priority: int
    cache_salt: str
    tenant: str
    service_level: str
    lease_id: str
    handoff: Handoff | None
    wants_vector: bool


class EngineClient:
    def __init__(
        self,
        settings: m.EngineSettings,
        metrics: Metrics,
        tracing: Tracing | None = None,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        """`timeout_s`: an engine that gives no sign of life for that long, and longer than its steps explain, is ended
        and started again."""
        self._settings = settings
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._metrics = metrics
        metrics.restarts = self.restarts = Restarts()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._mail = Mailroom(metrics, tracing)
        self._supervisor: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[m.Ready] | None = None
        self._misheard: asyncio.Future[Exception] | None = None
        self._watch: HeartWatch | None = None
        self._is_hung = False
        self._back_off_s: float | None = None
        """Until the next start, once the engine that was last started is lost."""
        self._failure: str | None = None
        self._refusal: ApiError | None = None
        self.state = EngineState.STARTING
        self.facts: m.Ready | None = None
        """Of the engine that was last ready; a restarted one has the same model and settings."""
        self.hub: WatchHub | None = None
        """Told what those who watch want to know."""
        self._num_hub_faults = 0

    async def start(self) -> m.Ready:
        """Returns when the engine is ready; raises BackendError when it cannot be built. Later deaths are mended."""
        self._ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        was_ready, self.state = self.state is EngineState.READY, EngineState.STOPPED
        if was_ready and self._process is not None:
            self._send(m.encode(m.Stop()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_LIMIT_S)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._context.destroy(linger=0)

    @property
    def model(self) -> str:
        """As whoever started the server named it: a short name, a path, a Hub id."""
        return self._settings.model

    @property
    def health(self) -> str:
        """`ready`, or what is wrong instead."""
        if self.state is EngineState.READY and self._watch is not None and self._watch.is_doubtful:
            return "stalled"
        return self.state.value

    def tenant_secret(self) -> bytes | None:
        """To name tenants with where their prefixes outlive this server; None: they do not."""
        return tier_secret(self._settings.config.kv)

    @property
    def num_waiting(self) -> int:
        """Requests handed over of which nothing was heard yet: the queue, as its callers see it."""
        return self._mail.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._mail.num_in_flight

    def submit(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        name: str = "",
        second_texts: Sequence[int | None] = (),
        **common: Unpack[Common],
    ) -> Inbox:
        """Queue one request a prompt; what the engine refuses arrives in the inbox as an error. `name`: what its client
        calls the call. `second_texts`: where a prompt is two texts, the token that the second begins at."""
        if self._refusal is not None:
            raise self._refusal
        if self.state is not EngineState.READY:
            raise self.unavailable()
        inbox = self._mail.open(len(prompts), sampling.n, self._close_inbox)
        inbox.name = name
        request_ids = inbox.unfinished
        seconds = second_texts or (None,) * len(prompts)
        adds = [
            m.encode(m.Add(Request(request_id, prompt, sampling, **common, call=request_ids[0], second_text_at=second)))
            for request_id, prompt, second in zip(request_ids, prompts, seconds, strict=True)
        ]
        self._mail.expect(inbox)
        for add in adds:
            self._send(add)
        self.asked(name)  # whoever had paused the engine meanwhile
        return inbox

    def asked(self, name: str) -> None:
        """A request has come: an engine that another viewer had paused goes on."""
        self._tell_hub(lambda hub: hub.holding.submitted(name))

    def tell(self, message: m.Watch | m.Hold | m.Grant) -> None:
        """To the engine, where there is one; one that starts later is told by whoever asked."""
        if self.state is EngineState.READY:
            self._send(m.encode(message))

    def name_of(self, request_id: str) -> str:
        return self._mail.name_of(request_id)

    def names_in_flight(self) -> set[str]:
        return self._mail.names()

    def unavailable(self) -> ApiError:
        if self.state is EngineState.STARTING:
            return engine_unavailable("the engine is still starting", self.restarts.retry_after_s)
        if self.state is EngineState.RESTARTING:
            message = "the engine ended unexpectedly and is being started again"
            return engine_unavailable(message, self.restarts.retry_after_s)
        return engine_unavailable("the server is stopping")

    def _close_inbox(self, inbox: Inbox) -> None:
        left = self._mail.forget(inbox)
        if left and self.state is EngineState.READY:
            self._send(m.encode(m.Abort(tuple(left))))

    def _send(self, message: bytes) -> None:
        assert self._socket is not None
        with suppress(zmq.ZMQError):  # a closed socket: the supervisor is about to fail everyone anyway
            self._socket.send(message, zmq.NOBLOCK)  # the queue has no limit, so it is sent at once
        # Sending may have swallowed the sign that something came in: look.
        asyncio.get_running_loop().call_soon(self._read, self._socket)

    # The engine's life

    async def _supervise(self) -> None:
        folder = private_folder()
        assert self._ready is not None
        try:
            for generation in count():
                self._failure, self._is_hung, self._back_off_s = None, False, None
                self.restarts.starting()
                try:
                    await self._live(folder / f"engine-{generation}.sock")
                except (OSError, zmq.ZMQError) as error:  # no process or socket to be had just now
                    self._failure = str(error)
                if self.state is EngineState.STOPPED:
                    return
                if not self._ready.done():
                    self._ready.set_exception(BackendError(self._failure or "the engine process ended as it started"))
                    return
                back_off_s = self._lose() if self._back_off_s is None else self._back_off_s
                what = "the engine process hung and was ended" if self._is_hung else "the engine process ended"
                reason = f" ({self._failure})" if self._failure else ""
                log(f"{what}{reason}; it is started again in {back_off_s:g} s")
                await asyncio.sleep(back_off_s)
        finally:
            self._fail_all()
            shutil.rmtree(folder, ignore_errors=True)

    async def _live(self, path: Path) -> None:
        """One engine process, from its start to its end."""
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{path}")
        try:
            process, beats = await start_process(path, self._settings)
        except OSError:
            socket.close()
            raise
        self._socket, self._process = socket, process
        self._watch = watch = HeartWatch(beats, self._timeout_s)
        loop = asyncio.get_running_loop()
        # A callback, not a task that awaits: every step of the engine passes here, and each is waited for by someone.
        loop.add_reader(socket.FD, self._read, socket)
        self._misheard = loop.create_future()
        ended, hung = asyncio.create_task(process.wait()), asyncio.create_task(watch.hung())
        try:
            any_of: set[asyncio.Future[Any]] = {self._misheard, ended, hung}
            await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
            if self._misheard.done():
                self._failure = f"what it said could not be understood: {self._misheard.result()!r}"
            elif not ended.done():
                self._failure, self._is_hung = hung.result(), True
                if self.state is EngineState.READY:
                    self._lose()  # before it is ended: one that waits for a device may take long to go
            elif code := ended.result():
                await asyncio.sleep(LAST_WORDS_S)  # what it said before it ended may still be on its way
                self._failure = self._failure or (f"signal {-code}" if code < 0 else f"exit code {code}")
        finally:
            loop.remove_reader(socket.FD)
            ended.cancel()
            hung.cancel()
            watch.close()
            if process.returncode is None:
                await _end(process)
            self._socket = None
            socket.close()

    def _lose(self) -> float:
        """The engine is gone, or as good as gone: whoever waits for it is told. Returns the seconds to the next."""
        self.state = EngineState.RESTARTING
        self._back_off_s = back_off_s = self.restarts.ended(is_hung=self._is_hung)
        self._fail_all()
        self._tell_hub(lambda hub: hub.flush())  # which tells the state
        return back_off_s

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        """All that is there: the socket gives no second sign of what is left in it."""
        try:
            while socket is self._socket and m.has_message(socket):
                self._hear(m.decode_from_engine(socket.recv(zmq.NOBLOCK)))
        except Exception as error:
            if self._misheard is not None and not self._misheard.done():
                self._misheard.set_result(error)

    def _hear(self, message: m.FromEngine) -> None:
        if isinstance(message, m.StepOutputs):
            self._mail.deal_out(message)
            self._tell_hub(lambda hub: hub.ended(message.outputs) if hub.is_on else None)
        elif isinstance(message, m.Seen):
            self._tell_hub(lambda hub: hub.seen(message.events))
        elif isinstance(message, m.Stats):
            self._metrics.heard(message)
        elif isinstance(message, m.Refused):
            self._mail.refuse(message)
        elif isinstance(message, m.Ready):
            self.facts = self._metrics.facts = message
            self.state = EngineState.READY
            self.restarts.ready()
            self._tell_hub(lambda hub: hub.engine_ready())
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        else:
            self._failure = message.message

    def _tell_hub(self, tell: Callable[[WatchHub], None]) -> None:
        """What goes wrong there is the page's alone: the engine and its answers go on."""
        if self.hub is None:
            return
        try:
            tell(self.hub)
        except Exception as error:
            self._num_hub_faults += 1
            if self._num_hub_faults & (self._num_hub_faults - 1) == 0:  # the first, the second, the fourth ...
                log(f"the live page was not told of something: {type(error).__name__}: {error}")

    def end_all(self, error: ApiError) -> None:
        """Every call in flight, and any that still comes, ends with this error; what the engine does is dropped."""
        self._refusal = error
        self._mail.end_all(error)

    def _fail_all(self) -> None:
        if self._tracing is not None:
            self._tracing.engine_ended()
        self._metrics.engine = None  # nothing of it is true any more
        self._mail.fail_all(self._ending())

    def _ending(self) -> ApiError:
        """What calls in flight are told when their engine has ended."""
        if self.state is EngineState.STOPPED:
            return server_stopped()
        how = "hung" if self._is_hung else "ended"
        message = f"the engine {how} while it worked on this request; it is being started again"
        return engine_unavailable(message, self.restarts.retry_after_s)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.kill()
    try:
        await asyncio.wait_for(process.wait(), KILL_LIMIT_S)
    except TimeoutError:
        log(f"the engine process {process.pid} cannot be ended: the system holds it")
