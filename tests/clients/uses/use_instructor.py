"""instructor: a class filled in, in each of the ways in which it holds an OpenAI server to one."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("mode TOOLS"):
    # shown
    from typing import Literal

    import instructor
    from openai import OpenAI
    from pydantic import BaseModel

    class Cat(BaseModel, extra="forbid"):
        colour: Literal["black", "white"]

    client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY))
    messages = [{"role": "user", "content": "Tom is a black cat."}]
    print(client.create(model=MODEL, messages=messages, response_model=Cat))
    # end
    assert isinstance(client.create(model=MODEL, messages=messages, response_model=Cat), Cat)

for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    with part(f"mode {mode.name}"):
        other = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=mode)
        assert isinstance(other.create(model=MODEL, messages=messages, response_model=Cat), Cat)

with part("mode RESPONSES_TOOLS"):
    other = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=instructor.Mode.RESPONSES_TOOLS)
    assert isinstance(other.responses.create(model=MODEL, input=messages, response_model=Cat), Cat)

with part("stream of partial answers"):
    partial = list(client.create_partial(model=MODEL, messages=messages, response_model=Cat))
    assert partial[-1].colour in ("black", "white")

finish()
