"""llama-index: a chat, a stream, a completion, and an answer read into a class."""

from typing import Literal

from given import API_KEY, BASE_URL, MODEL, finish, part
from pydantic import BaseModel


class Cat(BaseModel, extra="forbid"):
    colour: Literal["black", "white"]


with part("chat"):
    # shown
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    where = {"api_base": BASE_URL, "api_key": API_KEY}
    model = OpenAILike(MODEL, **where, is_chat_model=True, is_function_calling_model=True)
    answer = model.chat([ChatMessage("Name three colours of the rainbow.")], max_tokens=40, temperature=0)
    print(answer.message.content)
    # end
    assert answer.message.content

with part("stream"):
    pieces = [
        chunk.delta
        for chunk in model.stream_chat(
            [ChatMessage("Name three colours of the rainbow.")], max_tokens=40, temperature=0
        )
    ]
    assert "".join(pieces) == answer.message.content

with part("completion"):
    plain = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=API_KEY, is_chat_model=False, max_tokens=10)
    assert plain.complete("1, 2, 3, 4,").text

with part("structured answer"):
    from llama_index.core.prompts import PromptTemplate

    cat = model.structured_predict(Cat, PromptTemplate("Tom is a black cat."))
    assert isinstance(cat, Cat)

with part("tool's call"):
    from llama_index.core.tools import FunctionTool

    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"Rain in {city}."

    result = model.predict_and_call(
        [FunctionTool.from_defaults(weather)], "How is the weather in Oslo?", tool_required=True
    )
    assert result.response.startswith("Rain in ")

finish()
