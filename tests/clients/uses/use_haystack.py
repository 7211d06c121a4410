"""haystack: a chat, whole and streamed, an agent that calls a tool, and an answer held to a class."""

from typing import Literal

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("chat"):
    # shown
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    options = {"max_tokens": 40, "temperature": 0}
    where = {"model": MODEL, "api_base_url": BASE_URL, "api_key": Secret.from_token(API_KEY)}
    chat = OpenAIChatGenerator(**where, generation_kwargs=options)
    answer = chat.run([ChatMessage.from_user("Name three colours of the rainbow.")])
    print(answer["replies"][0].text)
    # end
    whole = answer["replies"][0].text
    assert whole and answer["replies"][0].meta["usage"]["completion_tokens"] <= 40

with part("stream"):
    pieces = []
    chat.run(
        [ChatMessage.from_user("Name three colours of the rainbow.")],
        streaming_callback=lambda chunk: pieces.append(chunk.content),
    )
    assert "".join(pieces) == whole

with part("agent that calls a tool"):
    from haystack.components.agents import Agent
    from haystack.tools import Tool

    city = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    weather = Tool(
        name="weather",
        description="The weather of a city.",
        parameters={**city, "additionalProperties": False},
        function=lambda city: f"Rain in {city}.",
    )
    call = {"temperature": 0, "max_tokens": 200, "tool_choice": "required"}
    caller = OpenAIChatGenerator(**where, generation_kwargs=call)
    agent = Agent(chat_generator=caller, tools=[weather], exit_conditions=["weather"], max_agent_steps=2)
    told = agent.run([ChatMessage.from_user("How is the weather in Oslo?")])
    assert "Rain in" in str(told["messages"][-1].tool_call_result.result)

with part("structured answer"):
    from pydantic import BaseModel

    class Cat(BaseModel, extra="forbid"):
        colour: Literal["black", "white"]

    reply = chat.run([ChatMessage.from_user("Tom is a black cat.")], generation_kwargs={"response_format": Cat})
    assert Cat.model_validate_json(reply["replies"][0].text)

finish()
