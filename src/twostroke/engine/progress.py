"""A progress bar for long batches, on standard error. Costs nothing when not shown."""

from __future__ import annotations

from types import TracebackType


class BatchProgress:
    def __init__(self, num_requests: int, *, shown: bool) -> None:
        self._bar = None
        self._tokens = 0
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("answering"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("answering", total=num_requests, tokens=0)

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def count_tokens(self, count: int) -> None:
        if self._bar is not None:
            self._tokens += count
            self._bar.update(self._task, tokens=self._tokens)

    def finish_one(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)
