"""The offline API: `LLM("smollm2").generate(...)`, `.chat(...)`, `.stream(...)`. Calls from several threads are
serialised a step at a time, and share their steps: two streams run as one batch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from itertools import count
from numbers import Integral
from os import PathLike, fspath
from subprocess import Popen
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from twostroke.config import EngineConfig, EngineOptions
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.events import AnswerEvent, Event, PrefillProgress, TokenEvent, VectorEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import Assembly, build
from twostroke.engine.interrupts import uninterrupted
from twostroke.engine.results import GenerationResult, Sample
from twostroke.engine.turns import FairLock
from twostroke.text.chat import ChatEncoder
from twostroke.text.side_process import end_process
from twostroke.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from twostroke.engine.embedding import Ranked
    from twostroke.explain.explanation import Explainer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
BYTES = (bytes, bytearray, memoryview)
"""Sequences of small integers, which are no token ids: whoever passes them forgot to decode a text."""


class LLM:
    """A model ready to answer. `LLM("smollm2", max_context=4096)`; options are the fields of EngineConfig."""

    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        template_process: Popen[bytes] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """`template_process` is one of `text.chat_template.start_process`, for who will chat and is in a hurry."""
        if not isinstance(model, (str, PathLike)):
            raise BadRequestError(f"model must be a name or a path, not {model!r:.60}")
        if config is not None and options:
            raise BadRequestError("give either a config or options, not both")
        if config is not None and not isinstance(config, EngineConfig):
            raise BadRequestError(f"config must be an EngineConfig, not {config!r:.60}")
        self._own(build(fspath(model), config or _config_of(options)), template_process)

    @classmethod
    def from_assembly(cls, assembly: Assembly) -> LLM:
        llm = cls.__new__(cls)
        llm._own(assembly)
        return llm

    def _own(self, assembly: Assembly, template_process: Popen[bytes] | None = None) -> None:
        self.assembly = assembly
        self.engine = assembly.engine
        self._template_process = template_process
        self._lock = FairLock()
        self._numbers = count()
        self._inboxes: dict[str, deque[Event]] = {}
        self._left: deque[str] = deque()  # requests nobody listens to any more
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer:
        if self.assembly.tokenizer is None:
            raise BadRequestError("random weights have no tokenizer, so they read no text: give token ids instead")
        return self.assembly.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        service_level: str = "",
    ) -> list[GenerationResult]:
        """Answer every prompt (text or token ids), in one continuous batch; results come in the prompts' order.
        `progress` shows a bar; None: when there are several prompts and a terminal to show it on. `service_level`: the
        class whose promise they are held to; empty: the default."""
        batch = _as_batch(prompts)
        choices = _per_prompt(sampling, len(batch))
        requests = [self.request(prompt, choice, service_level) for prompt, choice in zip(batch, choices, strict=True)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        if progress is None:
            progress = len(batch) > 1 and sys.stderr.isatty()
        return self._run(requests, texts, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        service_level: str = "",
    ) -> list[GenerationResult]:
        """Answer one conversation, or several at once, through the model's chat template."""
        if isinstance(messages, (str, Mapping)):
            raise BadRequestError("messages must be a list of messages, each with a role and content")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.chat_token_ids(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling, progress=progress, service_level=service_level)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, service_level: str = ""
    ) -> Iterator[AnswerEvent]:
        """Yield events as the answer comes: PrefillProgress while the prompt is read, TokenEvent as it is written.
        Leaving the loop early aborts the request."""
        return self._events_of(self.request(prompt, sampling or SamplingParams(), service_level))

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        progress: bool | None = None,
    ) -> list[list[float]]:
        """The vectors of texts (or token ids), in their order.

        `prompt_name`: of the model's prompts, the one to put before each text; None: its default, if it has one.
        `dimensions`: only this many of the first numbers, brought to length 1 again. `truncate`: too long a text
        is cut at its end, and not refused."""
        from twostroke.engine.embedding import embed

        return embed(self, _as_batch(texts), prompt_name, dimensions, truncate, progress)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """The documents by how well they answer the query, the best first: `index` and `score` of each. A reranker
        scores each beside the query; with an embedding model the score is the cosine of their vectors. `instruction`:
        what Qwen3-Reranker is to judge."""
        from twostroke.engine.embedding import rerank

        return rerank(self, query, documents, top_n, truncate, instruction)

    def vectors(self, requests: list[Request], progress: bool | None = None) -> list[bytes]:
        """What requests for vectors bring, as events have it. Raises BackendError for the first that failed."""
        shown = len(requests) > 1 and sys.stderr.isatty() if progress is None else progress
        results = self._run(requests, [None] * len(requests), shown)
        for result in results:
            if result.vector is None:
                raise BackendError(result.error or "a text was given up before its vector came")
        return [result.vector for result in results if result.vector is not None]

    def chat_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a conversation, as the model's chat template renders it. Special tokens that a user wrote
        inside a message stay plain text."""
        self.engine.check_process()  # the template's process belongs to another, too
        return self._chat_encoder.encode(messages)

    @cached_property
    def explainer(self) -> Explainer:
        """Says where a finished sample's time went, from its timing."""
        from twostroke.engine.explaining import explainer_of

        return explainer_of(self.assembly)

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        process, self._template_process = self._template_process, None
        return ChatEncoder(self.tokenizer, process)

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        service_level: str = "",
        *,
        wants_vector: bool = False,
        second_text_at: int | None = None,
    ) -> Request:
        self.engine.check_process()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        # By kinds: asking an abstract class about each token takes half a millisecond for a thousand of them.
        kinds = set(map(type, ids)) if isinstance(ids, Sequence) and not isinstance(ids, BYTES) else None
        if kinds is None or not all(issubclass(kind, Integral) for kind in kinds):
            raise BadRequestError(f"a prompt must be text or a list of token ids, not {prompt!r:.80}")
        return Request(
            request_id=f"request-{next(self._numbers)}",
            prompt_token_ids=tuple(ids) if kinds == {int} else tuple(map(int, ids)),
            sampling=sampling,
            eos_token_ids=frozenset() if self.assembly.tokenizer is None else self.tokenizer.eos_token_ids,
            service_level=service_level,
            wants_vector=wants_vector,
            second_text_at=second_text_at,
        )

    def close(self) -> None:
        """Free the backend; calls that are still running end with an error. In a forked process there is nothing to
        free: all of it belongs to the other."""
        if self.engine.is_forked:
            self._closed = True
            return
        with self._lock:
            self._closed = True
            self.engine.close()
        if "_chat_encoder" in self.__dict__:
            self._chat_encoder.close()
        if self._template_process is not None:
            end_process(self._template_process)
            self._template_process = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: list[Request], texts: list[str | None], progress: bool) -> list[GenerationResult]:
        results = {
            request.request_id: GenerationResult(
                request.request_id, text, request.prompt_token_ids, [Sample() for _ in range(request.sampling.n)]
            )
            for request, text in zip(requests, texts, strict=True)
        }
        from twostroke.engine.progress import BatchProgress

        try:
            for request in requests:
                self._add(request)
            with BatchProgress(len(requests), shown=progress) as bar:
                pending = set(results)
                while pending:
                    self._step(next(iter(pending)))
                    for name in list(pending):
                        for event in self._take(name):
                            if isinstance(event, TokenEvent):
                                results[name].absorb(event)
                                bar.count_tokens(len(event.token_ids))
                            elif isinstance(event, VectorEvent):
                                results[name].vector = event.vector
                        if results[name].is_finished:
                            pending.discard(name)
                            bar.finish_one()
        finally:
            self._forget([request.request_id for request in requests])
        for result in results.values():
            result.explainer = self.explainer
        return list(results.values())

    def _events_of(self, request: Request) -> Iterator[AnswerEvent]:
        self._add(request)
        unfinished = request.sampling.n
        try:
            while unfinished:
                for event in self._take(request.request_id):
                    if isinstance(event, TokenEvent) and event.finish_reason is not None:
                        unfinished -= 1
                    if not isinstance(event, VectorEvent):
                        yield event
                if unfinished:
                    self._step(request.request_id)
        finally:
            self._forget([request.request_id])

    def _add(self, request: Request) -> None:
        with self._lock:
            if self._closed:
                raise BadRequestError("this LLM is closed")
            with uninterrupted():
                self.engine.add(request)
                self._inboxes[request.request_id] = deque()

    def _take(self, request_id: str) -> list[Event]:
        inbox = self._inboxes[request_id]
        return [inbox.popleft() for _ in range(len(inbox))]

    def _step(self, request_id: str) -> None:
        """One step for everyone, unless another thread's has brought news of this request while we waited."""
        with self._lock:
            self._abort_left()
            if not self._inboxes[request_id] and self.engine.busy:
                events = self.engine.step()
                with uninterrupted():
                    for event in events:
                        if (inbox := self._inboxes.get(event.request_id)) is not None:
                            inbox.append(event)

    def _forget(self, request_ids: list[str]) -> None:
        """Close the inboxes, and abort what is unfinished. A stream that is collected as garbage ends here at any
        moment, also inside a step of this very thread: so this never waits for the lock; its holder aborts for us."""
        for name in request_ids:
            if self._inboxes.pop(name, None) is not None:
                self._left.append(name)
        if self._left and self._lock.try_acquire():
            try:
                self._abort_left()
            finally:
                self._lock.release()

    def _abort_left(self) -> None:
        while self._left:
            self.engine.abort(self._left.popleft())


def _config_of(options: EngineOptions) -> EngineConfig:
    names = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are: {', '.join(names)}"
            raise BadRequestError(f"there is no option {name}; {hint}")
    return EngineConfig(**options)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise BadRequestError(f"prompts must be text, token ids, or a list of either, not {type(prompts).__name__}")
    if isinstance(prompts, BYTES):
        raise BadRequestError(f"prompts must be text or token ids, not {type(prompts).__name__}: decode them first")
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(sampling: SamplingParams | Sequence[SamplingParams] | None, count_: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count_
    if len(sampling) != count_:
        raise BadRequestError(f"{len(sampling)} sampling parameters were given for {count_} prompts")
    return list(sampling)


__all__ = ["LLM", "GenerationResult", "PrefillProgress", "Sample", "TokenEvent"]
