"""OpenAI's own client: a chat, a stream, an answer read into a class, a tool's call and its result, and responses."""

import json
from typing import Literal

from given import API_KEY, BASE_URL, MODEL, finish, part
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Cat(BaseModel, extra="forbid"):
    colour: Literal["black", "white"]
    likes_fish: bool


with part("chat"):
    # shown
    from openai import OpenAI

    client = OpenAI(base_url=BASE_URL, api_key=API_KEY)
    question = [{"role": "user", "content": "Name three colours of the rainbow."}]
    answer = client.chat.completions.create(model=MODEL, messages=question, temperature=0, max_tokens=40)
    print(answer.choices[0].message.content)
    # end
    whole = answer.choices[0].message.content
    assert whole and answer.usage.completion_tokens <= 40

with part("stream"):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

with part("answer read into a class"):
    ask = [{"role": "user", "content": "Tell me about a cat, as JSON."}]
    parsed = client.chat.completions.parse(model=MODEL, messages=ask, response_format=Cat, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Cat)

with part("tool's call and its result"):
    ask = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.chat.completions.create(
        model=MODEL, messages=ask, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=100
    )
    message = called.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Oslo")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain, 4 degrees."}
    told = client.chat.completions.create(
        model=MODEL, messages=[*ask, message, result], tools=[TOOL], temperature=0, max_tokens=40
    )
    assert told.choices[0].message.content

with part("responses"):
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40)
    assert response.output_text == whole
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole

with part("list of models"):
    assert [model.id for model in client.models.list()] == [MODEL]

finish()
