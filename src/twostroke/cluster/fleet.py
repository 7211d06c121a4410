"""A fleet on one machine: a router and workers as child processes, started in order, watched, started anew when one
dies, and ended together. Says what happens through a callback; draws nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from twostroke.cluster.bound_child import bound
from twostroke.cluster.cards import VISIBLE
from twostroke.cluster.children import MOST_RESTARTS, Child, how_it_ended
from twostroke.cluster.keys import environment_of, new_fleet_key, router_key, write_secret
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import RouterClient, RouterError
from twostroke.cluster.routers import RouterPlan, check_router
from twostroke.core.errors import BackendError

LOOPBACK = "127.0.0.1"
LOOK_S = 0.1
ROUTER_START_S = 60.0
WORKER_START_S = 600.0
REGISTER_S = 60.0
ROUTER_END_S = 5.0
KILL_S = 5.0
KEY_FILE, STATE_FILE = "key", "fleet.json"

_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True, slots=True)
class FleetPlan:
    model: str
    roles: tuple[Role, ...]
    """One a worker."""
    router: str
    port: int
    """The router's; 0 takes a free one."""
    folder: Path
    """For logs and the key; made anew."""
    worker_options: tuple[str, ...] = ()
    """For `twostroke serve`."""
    drain_s: float = 30.0
    """What workers may take to end, after they were told."""
    host: str = LOOPBACK
    """Where the router listens."""
    cards: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES is for each worker; none: what it is here."""


@dataclass(frozen=True, slots=True)
class Member:
    child: Child
    role: Role | None
    """None: the router."""
    url: str


class Fleet:
    def __init__(self, plan: FleetPlan, say: Callable[[str], None]) -> None:
        check_router(plan.router)
        check_port(plan.host, plan.port)
        self._plan, self._say = plan, say
        self._is_ending = False
        has_roles = any(role is not Role.BOTH for role in plan.roles)
        port = plan.port or free_port()
        self._router_plan = RouterPlan(plan.router, plan.host, port, free_port(), has_roles)
        self.url = f"http://{LOOPBACK if plan.host == '0.0.0.0' else plan.host}:{port}"
        self._make_folder(key := new_fleet_key())
        self._environment = environment_of(key)
        self._client = RouterClient(self.url, router_key(key))
        ports = [free_port() for _ in plan.roles]
        self.workers = [
            self._worker(place, role, port) for place, (role, port) in enumerate(zip(plan.roles, ports, strict=True))
        ]
        command = self._router_plan.command({worker.url: worker.role or Role.BOTH for worker in self.workers})
        self.router = Member(self._child("router", command), None, self.url)

    def _make_folder(self, key: str) -> None:
        folder = self._plan.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        for old in folder.glob("*.log"):
            old.unlink()
        write_secret(folder / KEY_FILE, key)

    def _child(self, name: str, command: Sequence[str], **more: str) -> Child:
        return Child(name, command, {**self._environment, **more}, self._plan.folder / f"{name}.log")

    def _worker(self, place: int, role: Role, port: int) -> Member:
        url = f"http://{LOOPBACK}:{port}"
        serve = [sys.executable, "-P", "-c", "from twostroke.cli import main; main()", "serve", self._plan.model]
        serve += ["--host", LOOPBACK, "--port", str(port), "--drain", f"{self._plan.drain_s:g}"]
        if role is not Role.BOTH:
            serve += ["--role", role.value]
        if self._router_plan.registers:
            serve += ["--register", self.url]
        name = f"worker-{place}" if role is Role.BOTH else f"{role.value}-{place}"
        card = {VISIBLE: self._plan.cards[place]} if self._plan.cards else {}
        return Member(self._child(name, bound([*serve, *self._plan.worker_options]), **card), role, url)

    @property
    def members(self) -> list[Member]:
        return [self.router, *self.workers]

    # Its life

    def start(self) -> None:
        """Returns when requests are served. Raises BackendError where a member cannot be started; `end` is to be called
        in any case."""
        self._write_state()
        if self._router_plan.registers:
            self._start_router()
        for worker in self.workers:
            worker.child.start()
        self._write_state()
        for worker in self.workers:
            self._until(lambda worker=worker: _answers(f"{worker.url}/health"), WORKER_START_S, worker)  # type: ignore[misc]
        if self._router_plan.registers:
            self._until(self._all_known, REGISTER_S, self.router)
        else:
            self._start_router()
        self._write_state()

    def _start_router(self) -> None:
        self.router.child.start()
        self._until(lambda: _answers(f"{self.url}/health"), ROUTER_START_S, self.router)

    def _all_known(self) -> bool:
        try:
            healthy = {worker.url.rstrip("/") for worker in self._client.workers() if worker.is_healthy}
        except RouterError:
            return False
        return healthy >= {worker.url for worker in self.workers}

    def _until(self, is_so: Callable[[], bool], limit_s: float, member: Member) -> None:
        until_s = time.monotonic() + limit_s
        while not is_so():
            for one in self.members:
                child = one.child
                if child.process is not None and (code := child.process.poll()) is not None:
                    raise BackendError(f"{child.name} ended as it started ({how_it_ended(code)}): {child.last_words()}")
            if time.monotonic() >= until_s:
                raise BackendError(f"{member.child.name} is not ready after {limit_s:g} s; see {member.child.log_path}")
            time.sleep(LOOK_S)

    def follow(self) -> None:
        """Until `stop` is called: a member that dies is said, and started anew. Raises BackendError when one dies too
        often."""
        while not self._is_ending:
            self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        for member in self.members:
            child = member.child
            if (code := child.has_died()) is not None:
                if child.again_s is None:
                    words = child.last_words()
                    raise BackendError(f"{child.name} died more than {MOST_RESTARTS} times, and is given up: {words}")
                wait_s = max(0.0, child.again_s - time.monotonic())
                self._say(f"{child.name} died ({how_it_ended(code)}); it is started again in {wait_s:.1f} s")
                self._take_out(member)
            if child.start_if_due():
                self._say(f"{child.name} was started again, as process {child.pid}")
                self._write_state()

    def _take_out(self, member: Member) -> None:
        """Of two pools a router asks the one worker that reads again and again, dead or not. It adds itself when it is
        back."""
        if member.role in (None, Role.BOTH) or not self._router_plan.registers:
            return
        with suppress(RouterError):  # it may have died, too, and knows nobody when it is back
            for worker in self._client.workers():
                if worker.url.rstrip("/") == member.url and worker.worker_id is not None:
                    self._client.remove(worker.worker_id)

    def stop(self) -> None:
        """To be called from a signal's handler: `follow` returns soon."""
        self._is_ending = True

    def end(self) -> None:
        """Workers first, each of which leaves the router and lets its answers end; then the router. What does not end
        in time is killed, and a Ctrl-C while it waits kills at once."""
        try:
            self._end_gently([worker.child for worker in self.workers], self._plan.drain_s + KILL_S)
            self._end_gently([self.router.child], ROUTER_END_S)
        finally:
            for member in self.members:
                member.child.tell(signal.SIGKILL)
            until_s = time.monotonic() + KILL_S
            for member in self.members:
                member.child.wait(until_s)
            for name in (KEY_FILE, STATE_FILE):
                with suppress(OSError):
                    (self._plan.folder / name).unlink()

    def _end_gently(self, children: list[Child], limit_s: float) -> None:
        for child in children:
            child.tell(signal.SIGTERM)
        until_s = time.monotonic() + limit_s
        for child in children:
            if not child.wait(until_s):
                self._say(f"{child.name} does not end, and is killed")

    def _write_state(self) -> None:
        """For `twostroke fleet status`, which looks for a fleet on this machine."""
        state = {
            "url": self.url,
            "pid": os.getpid(),
            "model": self._plan.model,
            "router": self._plan.router,
            "members": [
                {"name": one.child.name, "role": one.role, "url": one.url, "pid": one.child.pid} for one in self.members
            ],
        }
        with suppress(OSError):
            write_secret(self._plan.folder / STATE_FILE, json.dumps(state))


def check_port(host: str, port: int) -> None:
    """Raises BackendError where it is taken: whoever has it might be held for the router."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BackendError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    """Whether it says that it is well."""
    try:
        with _open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (HTTPError, OSError, ValueError):
        return False
