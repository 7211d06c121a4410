"""Ollama's client: a chat, a stream, a prompt continued, an answer held to a schema, a tool's call, and the models."""

from typing import Literal

from given import ADDRESS, API_KEY, MODEL, finish, part
from pydantic import BaseModel


class Cat(BaseModel, extra="forbid"):
    colour: Literal["black", "white"]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return f"Rain in {city}."


with part("chat"):
    # shown
    import ollama

    client = ollama.Client(host=ADDRESS, headers={"Authorization": f"Bearer {API_KEY}"})
    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    answer = client.chat(model=MODEL, messages=messages, options={"temperature": 0, "num_predict": 40})
    print(answer.message.content)
    # end
    whole = answer.message.content
    assert whole and answer.eval_count <= 40 and answer.done

with part("stream"):
    options = {"temperature": 0, "num_predict": 40}
    chunks = list(client.chat(model=MODEL, messages=messages, options=options, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole and len(chunks) > 10

with part("prompt continued"):
    assert client.generate(model=MODEL, prompt="1, 2, 3, 4,", options=options).response

with part("structured answer"):
    asked = [{"role": "user", "content": "Tom is a black cat."}]
    told = client.chat(model=MODEL, messages=asked, format=Cat.model_json_schema(), options={"temperature": 0})
    assert Cat.model_validate_json(told.message.content)

with part("tools offered"):
    told = client.chat(model=MODEL, messages=messages, tools=[weather], options=options)
    assert told.message.content or told.message.tool_calls

with part("models"):
    assert any(model.model.partition(":")[0] == MODEL for model in client.list().models)
    assert client.show(MODEL).details.family

finish()
