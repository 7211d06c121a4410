"""`/v1/completions`: plain text or token ids, continued; with `echo` and `logprobs`, also what the model thinks of the
prompt itself, as evaluation harnesses ask."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, cast
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.core.events import PrefillProgress, TokenEvent
from twostroke.core.sampling_params import SamplingParams
from twostroke.server import replies
from twostroke.server.bodies import CheckedRoute
from twostroke.server.calls import Answer, Answers
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.explaining import follow
from twostroke.server.handoffs import HandedOn, read_only
from twostroke.server.logprobs import LEAST_LOGPROB, CompletionLogprobsWriter, joined
from twostroke.server.messages import Ready
from twostroke.server.openapi import JSON_OR_EVENTS
from twostroke.server.prompts import PromptEncoder, Room
from twostroke.server.sampling import check_served, completion_sampling
from twostroke.server.schemas import CompletionBody
from twostroke.server.service import Service, service_of
from twostroke.server.settings import Limits
from twostroke.server.streaming import DONE, respond, sse, sse_error
from twostroke.server.structured import requested_grammar
from twostroke.text.infill import Infill, infill_of
from twostroke.text.tokenizer import Tokenizer

router = APIRouter(route_class=CheckedRoute)

_MARK = "\u263a"


@router.post("/v1/completions", responses=JSON_OR_EVENTS)
async def completions(body: CompletionBody, request: Request) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    read_only(body)
    facts = service.writing_facts()
    level = service.level_of(request, body.service_level, body.service_tier)
    sampling = completion_sampling(body, service.settings.limits)
    infill = _infill(body, service.encoder().tokenizer)
    if infill is not None:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill.end_ids))
    prompts = _prompts(body, service.settings.limits)
    encoder, grammar = service.encoder(), requested_grammar(body)
    async with service.admission.place(request, len(prompts)) as place:
        ids = await _token_ids(encoder, prompts, facts, body.suffix or "", infill)
        check_served(ids, sampling, facts, "prompt")
        sampling = await service.constrained(sampling, grammar)
        echoes = None
        if body.echo:
            echoes = [await _echo(encoder, prompt, token_ids) for prompt, token_ids in zip(prompts, ids, strict=True)]
        wish = service.handoffs.wish(body.kv_transfer_params, ids)
        call = place.open_call(ids, sampling, level, priority=body.priority, cache_salt=body.cache_salt, wish=wish)
    writer = CompletionWriter(service, facts, sampling, body, Answers(len(ids), sampling.n), echoes)
    writer.prompt_tokens = sum(map(len, ids))
    writer.handed_on = service.handoffs.handed_on(wish, ids[0])
    follow(request, writer.answers, writer.id)
    takes_long = sampling.logprobs is not None and (body.echo or not body.stream)
    return await respond(call, writer, is_streamed=bool(body.stream), aside=service.aside if takes_long else None)


def _infill(body: CompletionBody, tokenizer: Tokenizer) -> Infill | None:
    """Where a hole is to be filled, how this model is asked to."""
    if not body.suffix:
        return None
    infill = infill_of(tokenizer)
    if infill is None:
        message = "suffix is not supported by this model: its vocabulary has no fill-in-the-middle tokens"
        raise bad_request(message, "suffix")
    if body.echo:
        raise bad_request("echo does not go with suffix: the answer stands between two texts", "echo")
    return infill


def _prompts(body: CompletionBody, limits: Limits) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif not prompt:
        raise bad_request("prompt is empty: a text or token ids are needed", "prompt")
    elif isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = cast("list[str | list[int]]", list(prompt))
    name, num_samples = ("n", body.n or 1) if body.best_of is None else ("best_of", body.best_of)
    num_answers = len(prompts) * num_samples
    if num_answers > limits.max_prompts:
        raise bad_request(
            f"{len(prompts)} prompts with {name} {num_samples} make {num_answers} answers; this server allows "
            f"{limits.max_prompts} in one request",
            "prompt",
        )
    return prompts


async def _token_ids(
    encoder: PromptEncoder, prompts: list[str | list[int]], facts: Ready, suffix: str, infill: Infill | None
) -> list[tuple[int, ...]]:
    """Prompts are all texts or all token ids."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    given = [tuple(prompt) for prompt in prompts if isinstance(prompt, list)]
    room = Room(facts.max_context, "prompt")
    if texts:
        read = await encoder.texts(texts, add_special_tokens=infill is None, room=room)
        given = [tuple(ids) for ids in read]
    if infill is None:
        return given
    # SentencePiece would put a space before the text behind the hole: it is encoded behind a mark that is taken away.
    mark = _MARK if encoder.tokenizer.leading_spaces_dropped else ""
    room = Room(facts.max_context, "suffix")
    marked, behind = await encoder.texts([mark, f"{mark}{suffix}"], add_special_tokens=False, room=room)
    if tuple(behind[: len(marked)]) != tuple(marked):
        marked, (behind,) = (), await encoder.texts([suffix], add_special_tokens=False, room=room)
    return [infill.prompt(encoder.tokenizer.prefix_ids, before, behind[len(marked) :]) for before in given]


def _mean_logprob(answer: Answer) -> float:
    """Of a token: a sum would favour short answers."""
    if not answer.logprobs:
        return -math.inf
    return math.fsum(max(entry.logprob, LEAST_LOGPROB) for entry in answer.logprobs) / len(answer.logprobs)


class Echo:
    """A prompt as it is repeated before its answer."""

    def __init__(self, text: str, token_ids: tuple[int, ...], num_unseen: int) -> None:
        self.text = text
        self.token_ids = token_ids
        self.num_unseen = num_unseen
        """Tokens at the beginning that stand for nothing in the text: a BOS that was put there."""


async def _echo(encoder: PromptEncoder, prompt: str | list[int], token_ids: tuple[int, ...]) -> Echo:
    if isinstance(prompt, str):
        return Echo(prompt, token_ids, len(encoder.tokenizer.prefix_ids))
    return Echo(await encoder.decode(token_ids, skip_special_tokens=False), token_ids, 0)


class CompletionWriter:
    def __init__(
        self,
        service: Service,
        facts: Ready,
        sampling: SamplingParams,
        body: CompletionBody,
        answers: Answers,
        echoes: list[Echo] | None,
    ) -> None:
        self.answers = answers
        self._facts = facts
        self._model = service.settings.model_name
        self.id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._echoes = echoes
        self._only_echo = body.max_tokens == 0
        self._wants_logprobs = body.logprobs is not None
        self._num_shown = body.n or 1
        tokenizer = service.encoder().tokenizer
        self._logprobs = [CompletionLogprobsWriter(tokenizer) for _ in self.answers.choices]
        options = body.stream_options
        self._wants_usage = options is not None and options.include_usage
        self._wants_progress = options is not None and options.include_progress
        self._counts_on = options is not None and options.continuous_usage_stats
        self.prompt_tokens = 0
        self._echoed: set[int] = set()
        self._plain = [self._plain_chunks(index) for index in range(len(self.answers.choices))] if body.stream else []
        self._unfinished = len(self.answers.choices)
        self.handed_on: HandedOn | None = None
        """Of a prompt that was read for another engine: what goes with the answer."""

    def whole(self) -> replies.Chunk:
        choices = []
        for shown_index, index in enumerate(self._shown()):
            answer = self.answers.choices[index]
            text, logprobs = self._opening(index)
            if not self._only_echo:
                text += "".join(answer.text)
                if self._wants_logprobs:
                    logprobs.append(self._logprobs[index].output(answer.logprobs))
            choices.append(
                replies.CompletionChoice(
                    shown_index,
                    text,
                    self._finish_reason(answer.finish_reason),
                    joined(logprobs) if self._wants_logprobs else None,
                    self.answers.own_timing(index, self._facts),
                )
            )
        params = None if self.handed_on is None else self.handed_on(self.answers.choices[0].handoff)
        timing = self.answers.timing(0, self._facts)
        return self._reply(choices, usage=self._usage(), timing=timing, kv_transfer_params=params)

    def _shown(self) -> list[int]:
        """Of each prompt's samples as many as were asked for: all of them, or the likeliest of `best_of`."""
        shown: list[int] = []
        for start in range(0, len(self.answers.choices), self.answers.num_samples):
            samples = list(range(start, start + self.answers.num_samples))
            if self._num_shown < len(samples):
                samples.sort(key=lambda index: -_mean_logprob(self.answers.choices[index]))  # stable
            shown += samples[: self._num_shown]
        return shown

    def _opening(self, index: int) -> tuple[str, list[replies.CompletionLogprobs]]:
        """The echoed prompt, where one is wanted. Sample 0 brings a prompt's logprobs for all of its siblings."""
        if self._echoes is None:
            return "", []
        prompt_index = index // self.answers.num_samples
        echo, first = self._echoes[prompt_index], self.answers.choices[prompt_index * self.answers.num_samples]
        if not self._wants_logprobs:
            return echo.text, []
        return echo.text, [self._logprobs[index].prompt(echo.token_ids, first.prompt_logprobs, echo.num_unseen)]

    def _finish_reason(self, reason: str | None) -> str:
        return "length" if self._only_echo else reason or "stop"

    def _usage(self) -> replies.Usage:
        usage = self.answers.usage()
        if not self._only_echo:
            return usage
        return replies.Usage(usage.prompt_tokens, 0, usage.prompt_tokens, usage.prompt_tokens_details)

    # As a stream

    def begin(self) -> bytes:
        return b""

    def progress(self, prompt_index: int, event: PrefillProgress) -> bytes:
        if not self._wants_progress:
            return b""
        index = prompt_index * self.answers.num_samples + event.sample_index
        shown = replies.PrefillProgress(index, event.computed_tokens, event.total_tokens)
        return sse(replies.encode(self._reply([], prefill_progress=shown)))

    def output(self, prompt_index: int, event: TokenEvent) -> bytes:
        index = self.answers.absorb(prompt_index, event)
        text = ""
        logprobs: list[replies.CompletionLogprobs] = []
        if event.token_ids and index not in self._echoed:  # the prompt was read to its end
            self._echoed.add(index)
            text, logprobs = self._opening(index)
        if not self._only_echo:
            text += event.text
            if event.logprobs:
                logprobs.append(self._logprobs[index].output(event.logprobs))
        if event.finish_reason is None and not logprobs and not self._counts_on:
            return self._plain[index].event(text) if text else b""
        if event.finish_reason is None and not text and not logprobs:
            return b""
        reason = None if event.finish_reason is None else self._finish_reason(event.finish_reason.value)
        own_timing = None if reason is None else self.answers.own_timing(index, self._facts)
        choice = replies.CompletionChoice(index, text, reason, joined(logprobs) if logprobs else None, own_timing)
        self._unfinished -= reason is not None
        is_last = self._unfinished == 0 and not self._wants_usage
        timing = self.answers.timing(0, self._facts) if is_last else None
        return sse(replies.encode(self._reply([choice], timing=timing)))

    def _plain_chunks(self, index: int) -> replies.TextChunks:
        return replies.TextChunks(lambda text: self._reply([replies.CompletionChoice(index, text, None, None)]))

    def end(self) -> bytes:
        if not self._wants_usage:
            return DONE
        last = self._reply([], usage=self._usage(), timing=self.answers.timing(0, self._facts))
        return sse(replies.encode(last)) + DONE

    def error(self, error: ApiError) -> bytes:
        return sse_error(error)

    def _reply(self, choices: list[replies.CompletionChoice], **more: Any) -> replies.Chunk:
        if self._counts_on and "usage" not in more:
            more["usage"] = self.answers.running_usage(self.prompt_tokens)
        return replies.Chunk(self.id, "text_completion", self._created, self._model, choices, **more)
