"""Messages to a prompt, by the model's own Jinja template. The template is a stranger's program: it runs sandboxed in a
process of its own (`template_worker.py`) that is ended when it takes too long, so no loop, power or doubling string in
it can stop or fill this process. Knows no tokens."""

from __future__ import annotations

import subprocess
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.text import side_process
from twostroke.text.side_process import Message, ProcessEndedError, end_process, exchange, set_up_process

if TYPE_CHECKING:  # the tokenizers library is not needed to start a process early
    from twostroke.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 512 * 1024
MAX_OUTPUT_CHARS = 32 * 2**20
MAX_MEMORY_BYTES = 512 * 2**20
RENDER_LIMIT_S = 2.0
LONG_TEXT_BYTES_A_S = 4 * 2**20
"""Long texts are given time on top: a render copies them a few times over."""
START_LIMIT_S = 30.0
"""For the process to come up, which on a loaded machine is not the template's fault."""
LONG_TEXT_CHARS = 64 * 1024
"""A text this long goes to the template's process beside the JSON."""


class Rendering(NamedTuple):
    text: str
    marks: Sequence[Sequence[int]]
    """Begin and end of each control token in it that the template wrote."""
    is_plain: bool
    """Nothing else in it looks like a control token."""


class ChatTemplate:
    """Renders are one at a time; a server with more threads may hold more than one of these."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        started: subprocess.Popen[bytes] | None = None,
        special_tokens: Iterable[str] = (),
    ) -> None:
        """`started` is a process from `start_process`, which this template then owns. `special_tokens` are looked for
        in what is rendered."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are taken")
        self._source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        self._special_tokens = sorted(special_tokens, key=len, reverse=True)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started = started

    @staticmethod
    def of(tokenizer: Tokenizer, started: subprocess.Popen[bytes] | None = None) -> ChatTemplate:
        if tokenizer.chat_template is None:
            raise BadRequestError("this model has no chat template, so it cannot chat; give it a plain prompt instead")
        tokens = tokenizer.bos_token, tokenizer.eos_token
        return ChatTemplate(tokenizer.chat_template, *tokens, started, tokenizer.special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        return self.render_tracked(messages, **options).text

    def render_tracked(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> Rendering:
        """The text, and which of the control tokens in it are the template's. `extra` reaches the template as variables
        of its own (`enable_thinking`, ...)."""
        variables = {
            "documents": None,
            **extra,
            "messages": check_messages(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        own = {name: text for name, text in self._tokens.items() if name not in extra}
        paths: list[list[str | int]] = []
        texts: list[bytes] = []
        try:
            variables = _without_long_texts(variables, [], paths, texts)
            request = Message({"variables": variables, "own": own, "paths": paths}, texts)
            with self._lock:
                reply = self._ask(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequestError(f"messages, tools and template options must be plain JSON values: {error}") from None
        if "refused" in reply.fields:
            raise BadRequestError(f"the model's chat template refused the messages: {reply.fields['refused']}")
        if "failed" in reply.fields:
            raise ModelError(f"the model's chat template failed: {reply.fields['failed']}")
        return Rendering(reply.texts[0].decode("utf-8", "surrogatepass"), **reply.fields)

    def close(self) -> None:
        """End the template's process; a later render starts another."""
        for process in (self._process, self._started):
            if process is not None:
                end_process(process)
        self._process = self._started = None

    def _ask(self, request: Message) -> Message:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._set_up()
        limit_s = RENDER_LIMIT_S + sum(map(len, request.texts)) / LONG_TEXT_BYTES_A_S
        try:
            return exchange(process, request, limit_s)
        except ProcessEndedError as ended:
            self.close()
            reason = f"it ran for {limit_s:.2g} s and was stopped" if ended.by_clock else "its process ended"
            return Message({"failed": reason})

    def _set_up(self) -> subprocess.Popen[bytes]:
        process, self._started = self._started, None
        self.close()
        if process is None or process.poll() is not None:
            process = start_process()
        weakref.finalize(self, end_process, process)
        setup = {
            "source": self._source,
            "special_tokens": self._special_tokens,
            "max_output_chars": MAX_OUTPUT_CHARS,
            "max_memory_bytes": MAX_MEMORY_BYTES,
        }
        set_up_process(process, setup, START_LIMIT_S, "the chat template")
        return process


def start_process() -> subprocess.Popen[bytes]:
    """A process for some template, which it is told later: who knows that one will be needed starts it early, and it
    comes up while the model is loaded."""
    try:
        return side_process.start_process("twostroke.text.template_worker")
    except OSError as error:
        raise ModelError(f"the process for the chat template could not be started: {error}") from None


def _without_long_texts(value: Any, path: list[str | int], paths: list[list[str | int]], texts: list[bytes]) -> Any:
    """The same, with nothing where a long text was; those are put, with where they belong, into the two lists."""
    if isinstance(value, str) and len(value) >= LONG_TEXT_CHARS:
        paths.append(path)
        texts.append(value.encode("utf-8", "surrogatepass"))
        return None
    if isinstance(value, Mapping):
        return {key: _without_long_texts(entry, [*path, key], paths, texts) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_long_texts(entry, [*path, index], paths, texts) for index, entry in enumerate(value)]
    return value


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template reads them: text parts joined by line breaks; roles are the template's matter."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise BadRequestError("messages must be a list of messages")
    if not messages:
        raise BadRequestError("messages is empty: at least one message is needed")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequestError(f"{name} must be an object with role and content, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise BadRequestError(f"{name}.role must be text")
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise BadRequestError(f"{name}.content is missing")
        return dict(message)
    if not isinstance(content, str):
        content = _join_parts(f"{name}.content", content)
    return {**message, "content": content}


def _join_parts(name: str, parts: object) -> str:
    if not isinstance(parts, Sequence):
        raise BadRequestError(f"{name} must be text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise BadRequestError(f"{name}[{index}] must be a part of type text, not {kind!r:.60}")
        if not isinstance(part.get("text"), str):
            raise BadRequestError(f"{name}[{index}].text must be text")
        texts.append(part["text"])
    return "\n".join(texts)
