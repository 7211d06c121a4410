"""Rendering equals transformers'; a hostile template ends with a sentence, and soon."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from twostroke.core.errors import BadRequestError, ModelError
from twostroke.text import chat_template
from twostroke.text.chat_template import MAX_TEMPLATE_CHARS, RENDER_LIMIT_S, ChatTemplate
from twostroke.text.tokenizer import Tokenizer

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}
{% generation %}{{ message.content | trim }}{{ '<|im_end|>' }}{% endgeneration %}
{{ '\\n' }}
    {% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{% endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- set ns = namespace(system='You are helpful.', first=true) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ ns.system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}\
{% endfor %}"""

GEMMA = """{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

TALK = [
    {"role": "user", "content": "  What is <b>2 & 2</b>? 'quoted' \"twice\" é 🦩\n"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And {{ 3 }} {% raw %}?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"type": "object"}}}]


def with_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return str(rendered[0])


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, GEMMA])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equals_transformers(source: str, tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> None:
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "enable_thinking": False}
    expected = with_transformers(source, TALK, bos_token="<s>", eos_token="</s>", **options)
    assert ChatTemplate(source, "<s>", "</s>").render(TALK, **options) == expected


def test_smollm2_own_template_equals_transformers(smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate.of(smollm2_tokenizer)
    assert smollm2_tokenizer.chat_template is not None
    for messages in (TALK, [{"role": "system", "content": "Be brief."}, *TALK]):
        expected = with_transformers(smollm2_tokenizer.chat_template, messages, add_generation_prompt=True)
        assert template.render(messages) == expected
    ids = smollm2_tokenizer.encode(template.render(TALK), add_special_tokens=False)
    assert ids.count(1) == 5 and ids.count(2) == 4


def test_strftime_now_gives_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(TALK) == time.strftime("%Y")


HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "long string": "{{ 'a' * 99999999999 }}",
    "folded at compile time": "{{ 'a' | center(99999999999) }}",
    "doubling string": "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s~ns.s %}{% endfor %}",
    "nested list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ messages | launch }}",
    "undefined": "{{ nothing.at.all }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_with_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "loops":  # one waits for the real limit
        monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.7)
    template = ChatTemplate(HOSTILE[name])
    started_s = time.monotonic()
    with pytest.raises(ModelError, match="chat template failed") as raised:
        template.render(TALK)
    assert time.monotonic() - started_s < RENDER_LIMIT_S + 60.0
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_template_that_was_stopped_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.7)
    template = ChatTemplate(
        "{% if slow %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    )
    with pytest.raises(ModelError, match="stopped"):
        template.render(TALK, slow=True)
    assert template.render(TALK, slow=False) == "ok"


def test_the_process_is_kept_between_renders_and_ends_with_its_template() -> None:
    template = ChatTemplate("ok")
    template.render(TALK)
    process = template._process
    assert process is not None
    template.render(TALK)
    assert template._process is process
    del template
    gc.collect()
    assert process.poll() is not None


def test_close_ends_the_process() -> None:
    template = ChatTemplate("ok")
    template.render(TALK)
    process = template._process
    template.close()
    assert process is not None and process.poll() is not None
    assert template.render(TALK) == "ok"


def test_the_template_refuses_messages() -> None:
    with pytest.raises(BadRequestError, match="Roles must alternate"):
        ChatTemplate(MISTRAL, "<s>", "</s>").render(TALK[1:])


def test_too_long_a_template_is_refused() -> None:
    with pytest.raises(ModelError, match="characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))


def test_a_model_without_a_template_says_so(llama_style: tuple[Any, Tokenizer]) -> None:
    with pytest.raises(BadRequestError, match="no chat template"):
        ChatTemplate.of(llama_style[1])


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "empty"),
    ("hello", "must be a list"),
    ({"role": "user", "content": "x"}, "must be a list"),
    (["hello"], r"messages\[0\] must be an object"),
    ([{"content": "x"}], r"messages\[0\].role"),
    ([{"role": 1, "content": "x"}], r"messages\[0\].role"),
    ([{"role": "user"}], r"messages\[0\].content"),
    ([{"role": "user", "content": 3}], r"messages\[0\].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\].*image_url"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
    ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
    ([{"role": "user", "content": "x", "extra": object()}], "plain JSON"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES)
def test_bad_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        ChatTemplate("ok").render(messages)


def test_text_parts_are_joined_and_tool_calls_need_no_content() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}{{ m.tool_calls }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [1]}]
    assert template.render(messages) == "[a\nb][None[1]]"


def test_a_process_that_was_started_early_is_used_and_ended() -> None:
    started = chat_template.start_process()
    template = ChatTemplate("ok", started=started)
    assert template.render(TALK) == "ok"
    assert template._process is started
    template.close()
    assert started.poll() is not None
    unused = chat_template.start_process()
    ChatTemplate("ok", started=unused).close()
    assert unused.poll() is not None


def test_a_process_that_ended_before_its_template_came_is_replaced() -> None:
    started = chat_template.start_process()
    started.kill()
    started.wait()
    assert ChatTemplate("ok", started=started).render(TALK) == "ok"
