"""The clients that people use, unchanged, get the offline engine's answers."""

from __future__ import annotations

import asyncio
import os

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from tests.server.running import RunningServer
from twostroke import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Name three colours of the rainbow, and say one thing about each."}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def greedy_text(offline: LLM) -> str:
    return offline.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=16))[0].text


def test_openai_chat_equals_the_offline_engine(client: OpenAI, greedy_text: str) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=0, max_tokens=16)
    assert answer.choices[0].message.content == greedy_text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_stream_equals_the_offline_engine(client: OpenAI, greedy_text: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=16,
            stream=True,
            stream_options=options,
            extra_body={"speculation": "off"},  # drafts that hold come several in a chunk
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == greedy_text
    assert len(chunks) > 12  # it was a stream indeed
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].timing["decode"]["tokens"] == 16


def test_openai_async_streams_share_steps_and_stay_apart(server: RunningServer, offline: LLM) -> None:
    prompts = [f"Count from {start} upwards:" for start in range(6)]
    alone = [offline.generate(prompt, SamplingParams(temperature=0.0, max_tokens=16))[0].text for prompt in prompts]

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="smollm2", prompt=prompt, temperature=0, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[str]:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_at_once()) == alone


def test_openai_samples_seed_and_stop(client: OpenAI) -> None:
    def ask(**options: object) -> list[str]:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=12, temperature=1.0, **options
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    samples = ask(n=3, seed=7)
    assert len(set(samples)) == 3
    assert ask(n=3, seed=7) == samples
    assert ask(seed=7)[0] == samples[0]
    stopped = client.completions.create(
        model="smollm2", prompt="1, 2, 3, 4,", temperature=0, max_tokens=30, stop=[" 7"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.strip() == "5, 6,"


def test_openai_logit_bias_and_ignore_eos(client: OpenAI, offline: LLM) -> None:
    (forced,) = offline.tokenizer.encode(" banana")[:1]
    answer = client.completions.create(
        model="smollm2", prompt="I like", temperature=0, max_tokens=3, logit_bias={str(forced): 100}
    )
    assert answer.choices[0].text == offline.tokenizer.decode([forced] * 3)
    long = client.completions.create(
        model="smollm2", prompt="Hi", temperature=0, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert long.usage.completion_tokens == 40


def test_openai_chat_logprobs_equal_the_offline_engine(client: OpenAI, offline: LLM) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    expected = offline.chat(MESSAGES, sampling)[0].samples[0].logprobs
    got = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in got] == pytest.approx([entry.logprob for entry in expected], abs=1e-6)
    for entry, wanted in zip(got, expected, strict=True):
        assert bytes(entry.bytes) == offline.tokenizer.token_bytes(wanted.token_id)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx([p for _, p in wanted.top], abs=1e-6)


def test_openai_responses(client: OpenAI, greedy_text: str) -> None:
    question = MESSAGES[0]["content"]
    whole = client.responses.create(model="smollm2", input=question, temperature=0, max_output_tokens=16)
    assert whole.output_text == greedy_text
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 16
    with client.responses.stream(model="smollm2", input=MESSAGES, temperature=0, max_output_tokens=16) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == greedy_text


def test_openai_sees_errors_as_its_own(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="this server has 'smollm2'") as not_found:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(BadRequestError, match="less than or equal to 2") as bad:
        client.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(APIStatusError, match=r"3000.*2048"):
        client.completions.create(model="smollm2", prompt="Hi", max_tokens=3000)
    assert client.models.list().data[0].id == "smollm2"
    assert client.models.retrieve("smollm2").id == "smollm2"


def test_litellm(server: RunningServer, greedy_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network when imported
    import litellm

    options = {"api_base": server.base_url, "api_key": "none", "temperature": 0, "max_tokens": 16}
    answer = litellm.completion(model="openai/smollm2", messages=MESSAGES, **options)
    assert answer.choices[0].message.content == greedy_text
    stream = litellm.completion(model="openai/smollm2", messages=MESSAGES, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == greedy_text


def test_langchain(server: RunningServer, greedy_text: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="smollm2", base_url=server.base_url, api_key="none", temperature=0, max_tokens=16)
    question = MESSAGES[0]["content"]
    answer = chat.invoke(question)
    assert answer.content == greedy_text
    assert answer.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.content for chunk in chat.stream(question)) == greedy_text
