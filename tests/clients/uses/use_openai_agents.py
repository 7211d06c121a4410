"""openai-agents: a structured answer, and an agent made to call a tool that reads its result: over responses, streamed,
and over chat completions."""

import asyncio

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("structured answer, by responses"):
    # shown
    from typing import Literal

    from agents import Agent, Runner, set_default_openai_client, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
    agent = Agent(name="Helper", model=MODEL, output_type=Literal["sun", "rain"])
    print(Runner.run_sync(agent, "What falls from the clouds?").final_output)
    # end
    assert Runner.run_sync(agent, "What falls from the clouds?").final_output in ("sun", "rain")

from agents import ModelSettings, OpenAIChatCompletionsModel, function_tool

calls: list[str] = []


@function_tool(is_enabled=lambda context, agent: not calls)  # once: the small model would ask for ever
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"Rain in {city}."


made_to_call = ModelSettings(tool_choice="required", temperature=0)
agent = agent.clone(tools=[weather], model_settings=made_to_call)

with part("agent that calls a tool, by chat completions"):
    chat = OpenAIChatCompletionsModel(MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))
    result = Runner.run_sync(agent.clone(model=chat), "How is the weather in Oslo?")
    assert result.final_output in ("sun", "rain") and calls

with part("agent that calls a tool, by responses, streamed"):

    async def run_streamed() -> tuple[set[str], str]:
        set_default_openai_client(AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY))  # a client lives in one loop
        calls.clear()
        run = Runner.run_streamed(agent, "How is the weather in Rome?")
        return {event.type async for event in run.stream_events()}, run.final_output

    kinds, weather_told = asyncio.run(run_streamed())
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert weather_told in ("sun", "rain") and calls

finish()
