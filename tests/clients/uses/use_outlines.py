"""outlines: answers held to a type, a class and a JSON schema, and a stream."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("structured answer"):
    # shown
    from typing import Literal

    import openai
    import outlines
    from pydantic import BaseModel

    class Cat(BaseModel, extra="forbid"):
        colour: Literal["black", "white"]

    model = outlines.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=API_KEY), MODEL)
    answer = model("Tom is a black cat.", Cat)
    print(Cat.model_validate_json(answer))
    # end
    assert Cat.model_validate_json(answer)

with part("stream of a structured answer"):
    assert Cat.model_validate_json("".join(model.stream("Tom is a black cat.", Cat)))

with part("choice, pattern and grammar, as to vLLM"):
    import re

    server = outlines.from_vllm(openai.OpenAI(base_url=BASE_URL, api_key=API_KEY), MODEL)
    assert server("Tom is a black cat. His colour:", Literal["black", "white"], max_tokens=20) in ("black", "white")
    assert re.fullmatch(r"\d{3}", server("A number:", outlines.regex(r"\d{3}"), max_tokens=20))
    assert server("Yes or no?", outlines.cfg('start: "yes" | "no"'), max_tokens=20) in ("yes", "no")
    assert Cat.model_validate_json(server("Tom is a black cat.", Cat, max_tokens=60))

finish()
