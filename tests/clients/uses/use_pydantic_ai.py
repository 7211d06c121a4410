"""pydantic-ai: answers read into a class in its three ways, an agent that calls a tool, a stream, and responses."""

import asyncio

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("structured answer"):
    # shown
    from typing import Literal

    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Cat(BaseModel, extra="forbid"):
        colour: Literal["black", "white"]

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
    agent = Agent(model, output_type=Cat)
    print(agent.run_sync("Tom is a black cat.").output)
    # end
    assert isinstance(agent.run_sync("Tom is a black cat.").output, Cat)

from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel

with part("structured answer by NativeOutput"):
    assert isinstance(Agent(model, output_type=NativeOutput(Cat)).run_sync("Tom is a black cat.").output, Cat)

with part("agent that calls a tool"):
    asked: list[str] = []

    def look_up(colour: Literal["black", "white"]) -> Cat:
        """Find a cat of a colour."""
        asked.append(colour)
        return Cat(colour=colour)

    # A function as the output: the model is made to call it, and the run ends with what it returned.
    found = Agent(model, output_type=look_up).run_sync("Find me a black cat.").output
    assert isinstance(found, Cat) and asked == [found.colour]

with part("stream"):

    async def words() -> list[str]:
        async with Agent(model).run_stream("Count to five.", model_settings={"max_tokens": 30}) as run:
            return [piece async for piece in run.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(words())) > 3

with part("responses"):
    responses = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=API_KEY))
    assert isinstance(Agent(responses, output_type=Cat).run_sync("Tom is a black cat.").output, Cat)
    assert isinstance(Agent(responses, output_type=NativeOutput(Cat)).run_sync("Tom is a black cat.").output, Cat)

finish()
