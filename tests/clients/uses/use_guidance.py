"""guidance: a chat with a hole that the model fills, streamed, and one that is held to a class."""

import json
from typing import Literal

from given import API_KEY, BASE_URL, MODEL, finish, part
from pydantic import BaseModel


class Cat(BaseModel, extra="forbid"):
    colour: Literal["black", "white"]


with part("chat with a hole"):
    # shown
    from guidance import assistant, gen, models, user

    model = models.OpenAI(MODEL, base_url=BASE_URL, api_key=API_KEY, echo=False)
    with user():
        model += "Name three colours of the rainbow."
    with assistant():
        print((model + gen("colours", max_tokens=40))["colours"])
    # end
    with assistant():
        model += gen("colours", max_tokens=40)
    assert model["colours"]

with part("structured answer"):
    import guidance

    model = models.OpenAI(MODEL, base_url=BASE_URL, api_key=API_KEY, echo=False)
    with user():
        model += "Tom is a black cat."
    with assistant():
        model += guidance.json("cat", schema=Cat)
    assert json.loads(model["cat"])["colour"] in ("black", "white")

finish()
