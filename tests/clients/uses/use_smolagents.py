"""smolagents: an agent that is made to call tools until it gives its final answer, and a stream."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("agent that calls tools"):
    # shown
    from smolagents import OpenAIModel, ToolCallingAgent

    options = {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
    model = OpenAIModel(MODEL, api_base=BASE_URL, api_key=API_KEY, **options)
    agent = ToolCallingAgent(tools=[], model=model, max_steps=3)
    print(agent.run("Give the word yes as your final answer."))
    # end
    steps = agent.memory.steps[1:]
    assert steps[0].tool_calls[0].name == "final_answer" and steps[0].is_final_answer

with part("stream"):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Count to five."}]}]
    pieces = [piece.content for piece in model.generate_stream(messages, max_tokens=30) if piece.content]
    assert len(pieces) > 3

finish()
