"""litellm: a chat and a stream by its name for OpenAI's servers, a completion, and responses."""

from given import API_KEY, BASE_URL, MODEL, finish, part

with part("chat"):
    # shown
    import litellm

    messages = [{"role": "user", "content": "Name three colours of the rainbow."}]
    where = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
    answer = litellm.completion(messages=messages, temperature=0, max_tokens=40, **where)
    print(answer.choices[0].message.content)
    # end
    whole = answer.choices[0].message.content
    assert whole

with part("stream"):
    chunks = litellm.completion(messages=messages, temperature=0, max_tokens=40, stream=True, **where)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

with part("chat by its name for vLLM's servers"):
    where["model"] = f"hosted_vllm/{MODEL}"
    answer = litellm.completion(messages=messages, temperature=0, max_tokens=40, **where)
    assert answer.choices[0].message.content == whole

with part("completion"):
    where["model"] = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion(prompt="1, 2, 3, 4,", temperature=0, max_tokens=6, **where).choices[0].text

with part("responses"):
    where["model"] = f"openai/{MODEL}"
    response = litellm.responses(input=messages, temperature=0, max_output_tokens=40, **where)
    assert response.output[0].content[0].text == whole

finish()
