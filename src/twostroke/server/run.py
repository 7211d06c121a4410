"""A server from its start to its end: the port is taken first, the engine starts while /health says so, and a signal
lets requests in flight finish before anything is stopped."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import msgspec
import uvicorn

from twostroke.cluster.registration import Registration
from twostroke.core.errors import BackendError, TwostrokeError
from twostroke.engine.build import read_tokenizer
from twostroke.server.app import create_app
from twostroke.server.client import EngineClient
from twostroke.server.connections import connection_class
from twostroke.server.elsewhere import Elsewhere
from twostroke.server.errors import server_stopped, server_stopping
from twostroke.server.heads import MAX_HEADER_BYTES
from twostroke.server.joining import registration_of, with_look_key, with_names
from twostroke.server.levels import LevelChoice
from twostroke.server.log import log
from twostroke.server.messages import EngineSettings, Ready
from twostroke.server.metrics import Metrics
from twostroke.server.recorder import FileRecorder
from twostroke.server.service import Service
from twostroke.server.settings import ServerSettings

KEEP_ALIVE_S = 30
SWITCH_S = 0.001
"""How long a thread that makes prompts or words answers keeps Python's lock from the event loop, as far as it can be
made to give it: a fifth of what Python has by itself."""
LAST_BYTES_S = 5
"""For what is written, once all answers have ended: until clients have taken it."""


def serve(engine: EngineSettings, settings: ServerSettings, on_ready: Callable[[Ready, str], None]) -> None:
    """Runs until it is told to stop. `on_ready` is given the engine's facts and the server's address."""
    sys.setswitchinterval(SWITCH_S)
    settings = with_look_key(settings)
    listener = listen(settings.host, settings.port)
    recorder = None if settings.record is None else FileRecorder(settings.record)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        registration = registration_of(settings, address)
        engine = with_names(engine, settings, address)
        with asyncio.Runner(loop_factory=_event_loop()) as runner:
            runner.run(
                _serve(engine, settings, listener, lambda facts: on_ready(facts, address), recorder, registration)
            )
    finally:
        listener.close()
        if recorder is not None:
            recorder.close()


def listen(host: str, port: int) -> socket.socket:
    """Before a model is loaded: nobody should wait for that to learn that a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise BackendError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # it does not exist for every platform
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """Drains on the first signal, stops on the second. While it drains the door stays open, so that whoever asks is
    told; Uvicorn's own would close it first, and raise the signal again in the end, while this process still has an
    engine to stop."""

    def __init__(self, config: uvicorn.Config, service: Service, registration: Registration | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._registration = registration
        self._leaving: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_told = False
        self._drained_by_s: float | None = None
        """None while nobody has told it to stop."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In the middle of whatever the signal broke into: nothing is sent, logged or published from here."""
        if self._is_told:
            self.should_exit = self.force_exit = True
        else:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        """Before it drains: a router that is not told goes on sending, and its clients would be turned away."""
        if self._registration is None:
            self._drain()
        else:
            self._leaving = self._loop.create_task(self._registration.leave())
            self._leaving.add_done_callback(lambda _: self._drain())

    def _drain(self) -> None:
        admission = self._service.admission
        number = self._service.client.num_in_flight + admission.num_preparing
        log(f"stopping: {number} requests in flight may finish; a second Ctrl-C stops at once")
        admission.draining = True
        self._drained_by_s = time.monotonic() + self._service.settings.drain_s
        self._service.hub.holding.release("the server is stopping")

    def _num_leases(self) -> int:
        """Prompts that were read for other servers, which have not taken them yet."""
        stats = self._service.metrics.engine
        return 0 if stats is None or stats.handoffs is None else stats.handoffs.leases

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self.force_exit:
            self._service.client.end_all(server_stopped())
        if self._drained_by_s is not None and not self.should_exit:
            client, admission = self._service.client, self._service.admission
            is_idle = client.num_in_flight + admission.num_preparing + self._num_leases() == 0
            if not is_idle and time.monotonic() >= self._drained_by_s:
                client.end_all(server_stopping())
            self.should_exit = is_idle or time.monotonic() >= self._drained_by_s
        if self.should_exit:
            self._service.hub.close()
        return await super().on_tick(counter)


async def _serve(
    engine: EngineSettings,
    settings: ServerSettings,
    listener: socket.socket,
    on_ready: Callable[[Ready], None],
    recorder: FileRecorder | None = None,
    registration: Registration | None = None,
) -> None:
    metrics, tracing = Metrics(), None
    if settings.traces_url is not None:
        from twostroke.server.tracing import Tracing  # an extra that nobody pays for unasked

        tracing = Tracing(settings.traces_url)
    client = EngineClient(engine, metrics, tracing, timeout_s=settings.engine_timeout_s)
    promised = engine.config.promised()
    levels = LevelChoice(promised, promised.keys, settings.api_keys, settings.key_names)
    service = Service(settings, client, metrics, tracing, levels)
    if registration is not None:
        service.handoffs.registered_at = lambda: registration.router_addresses
        service.elsewhere = Elsewhere(registration.router, registration.url, 2 * settings.limits.max_body_bytes)
    if recorder is not None:
        service.hub.record(recorder)
    config = uvicorn.Config(
        create_app(service),
        http=connection_class(settings.limits, metrics),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,  # ours tells how long each took, and no query
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )
    server = _Server(config, service, registration)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_start(engine, service, on_ready, registration))
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and (error := starting.exception()) is not None:
            server.should_exit = True
            await serving
            raise error
        await serving
    finally:
        starting.cancel()
        await client.close()
        if service.prompts is not None:
            service.prompts.close()
        if service.grammars is not None:
            service.grammars.close()
        service.aside.close()
        service.plans.close()
        if tracing is not None:
            tracing.close()


async def _start(
    engine: EngineSettings,
    service: Service,
    on_ready: Callable[[Ready], None],
    registration: Registration | None = None,
) -> None:
    """The tokenizer is read here while the engine is built there."""
    ready = asyncio.create_task(service.client.start())
    try:
        tokenizer = await asyncio.to_thread(read_tokenizer, engine.model)
        await asyncio.to_thread(service.read_answers_of, tokenizer)
        service.warm_up()
        facts = await ready
    except TwostrokeError:
        ready.cancel()
        raise
    note = service.answers_are_read(facts.family)
    # What is there by now stays: the garbage collector need not look at it again while tokens wait.
    gc.collect()
    gc.freeze()
    with suppress(OSError):  # a log on a full disk
        on_ready(facts if facts.vectors else msgspec.structs.replace(facts, notes=(*facts.notes, note)))
    if registration is not None:
        registration.start()
