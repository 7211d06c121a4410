"""dspy: a signature with typed outputs, asked for as JSON, whole and streamed, and a text completion."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("typed prediction with the JSON adapter"):
    # shown
    import dspy

    where = {"api_base": BASE_URL, "api_key": API_KEY}
    model = dspy.LM(f"openai/{MODEL}", temperature=0, max_tokens=300, **where)
    dspy.configure(lm=model, adapter=dspy.JSONAdapter())
    colour = dspy.Predict(dspy.Signature("sentence -> colour: Literal['black', 'white']"))
    print(colour(sentence="Tom is a black cat.").colour)
    # end
    assert colour(sentence="Tom is a black cat.").colour in ("black", "white")

with part("stream"):
    import asyncio

    program = dspy.streamify(
        dspy.Predict("sentence -> colour: Literal['black', 'white']"),
        stream_listeners=[dspy.streaming.StreamListener("colour")],
    )

    async def stream() -> list[object]:
        return [piece async for piece in program(sentence="Kitty is a white cat.")]

    pieces = asyncio.run(stream())
    assert isinstance(pieces[-1], dspy.Prediction)

with part("text completion"):
    plain = dspy.LM(f"text-completion-openai/{MODEL}", model_type="text", max_tokens=10, **where)
    assert plain("1, 2, 3, 4,")[0]

finish()
