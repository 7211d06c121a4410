"""Anthropic's client: a message, a stream, a tool's call and its result, and the count of a prompt's tokens."""

from given import ADDRESS, API_KEY, MODEL, finish, part

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

greedy = {"temperature": 0}  # its methods have no such parameter

with part("message"):
    # shown
    from anthropic import Anthropic

    client = Anthropic(base_url=ADDRESS, api_key=API_KEY)
    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    answer = client.messages.create(model=MODEL, messages=messages, max_tokens=40, extra_body={"temperature": 0})
    print(answer.content[0].text)
    # end
    whole = answer.content[0].text
    assert whole and answer.usage.output_tokens <= 40

with part("stream"), client.messages.stream(model=MODEL, messages=messages, max_tokens=40, extra_body=greedy) as stream:
    assert "".join(stream.text_stream) == whole

with part("tool's call and its result"):
    ask = [{"role": "user", "content": "How is the weather in Oslo?"}]
    options = {"model": MODEL, "tools": [TOOL], "max_tokens": 100, "extra_body": greedy}
    called = client.messages.create(
        messages=ask, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **options
    )
    call = next(block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use" and call.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain, 4 degrees."}
    turns = [*ask, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=turns, tool_choice={"type": "none"}, **options).content[0].text

with part("count of tokens"):
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

finish()
