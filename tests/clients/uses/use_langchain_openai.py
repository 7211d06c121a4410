"""langchain-openai: a chat, a stream, an answer read into a class, a tool's call and its result, and responses."""

from typing import Literal

from given import API_KEY, BASE_URL, MODEL, finish, part
from pydantic import BaseModel


class Cat(BaseModel, extra="forbid"):
    colour: Literal["black", "white"]


with part("chat"):
    # shown
    from langchain_openai import ChatOpenAI

    where = {"base_url": BASE_URL, "api_key": API_KEY}
    chat = ChatOpenAI(model=MODEL, temperature=0, max_tokens=40, **where)
    answer = chat.invoke("Name three colours of the rainbow.")
    print(answer.content)
    # end
    assert answer.content and answer.usage_metadata["output_tokens"] <= 40

with part("stream"):
    assert "".join(chunk.content for chunk in chat.stream("Name three colours of the rainbow.")) == answer.content

for method in ("json_schema", "function_calling"):
    with part(f"structured answer by {method}"):
        assert isinstance(chat.with_structured_output(Cat, method=method).invoke("Tom is a black cat."), Cat)

with part("tool's call and its result"):
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"Rain in {city}."

    asked = HumanMessage("How is the weather in Oslo?")
    called = chat.bind_tools([weather], tool_choice="required", max_tokens=200).invoke([asked])
    result = weather.invoke(called.tool_calls[0])
    assert result.content.startswith("Rain in ")
    assert chat.bind_tools([weather], tool_choice="none").invoke([asked, called, result]).content

with part("responses"):
    by_responses = ChatOpenAI(model=MODEL, temperature=0, max_tokens=40, use_responses_api=True, **where)
    assert by_responses.invoke("Name three colours of the rainbow.").text == answer.content

finish()
