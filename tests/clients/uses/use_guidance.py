"""guidance: text with holes that a remote model fills."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("chat with holes"):
    # shown
    from guidance import assistant, gen, models, user

    model = models.OpenAI(MODEL, base_url=BASE_URL, api_key=API_KEY, echo=False)
    with user():
        model += "Name three colours of the rainbow."
    with assistant():
        model += gen("colours", max_tokens=40)
    # end
    assert model["colours"]

finish()
