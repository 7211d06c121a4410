"""Plain completions: kinds of prompt, echo, and loglikelihoods as an evaluation harness asks for them."""

from __future__ import annotations

import json

import pytest

from tests.server.running import RunningServer
from twostroke import LLM, SamplingParams
from twostroke.explain.verdict import Cause


def complete(server: RunningServer, **body: object) -> dict:
    response = server.post("/v1/completions", {"temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_every_kind_of_prompt_gives_the_same_answer(server: RunningServer, offline: LLM) -> None:
    texts = ["The capital of Italy is", "def add(a, b):"]
    ids = [offline.tokenizer.encode(text) for text in texts]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    expected = [result.text for result in offline.generate(texts, greedy)]
    assert [c["text"] for c in complete(server, prompt=texts, max_tokens=8)["choices"]] == expected
    assert [c["text"] for c in complete(server, prompt=ids, max_tokens=8)["choices"]] == expected
    assert complete(server, prompt=texts[0], max_tokens=8)["choices"][0]["text"] == expected[0]
    assert complete(server, prompt=ids[1], max_tokens=8)["choices"][0]["text"] == expected[1]
    assert len(complete(server, prompt=texts, n=2, max_tokens=2)["choices"]) == 4


def test_loglikelihood_equals_the_offline_engine(server: RunningServer, offline: LLM) -> None:
    """The request and the reading of lm-eval's `local-completions`: token ids, echo, one token more."""
    context = offline.tokenizer.encode("The capital of France is")
    continuations = [offline.tokenizer.encode(text) for text in (" Paris", " a city called Berlin")]
    answer = complete(
        server,
        prompt=[[*context, *continuation] for continuation in continuations],
        max_tokens=1,
        logprobs=1,
        echo=True,
        seed=1234,
    )
    for choice, continuation in zip(answer["choices"], continuations, strict=True):
        token_logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(token_logprobs, tops, strict=True))
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        expected = offline.generate([*context, *continuation], sampling)[0].prompt_logprobs[-len(continuation) :]
        assert token_logprobs == pytest.approx([entry.logprob for entry in expected], abs=1e-6)
        assert is_greedy == all(entry.token_id == entry.top[0][0] for entry in expected)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_gives_the_prompt_and_its_logprobs(server: RunningServer, offline: LLM, stream: bool) -> None:
    prompt = "Ein Gruß 🫠 aus Bern"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0, "stream": stream}
    text = server.post("/v1/completions", body).text
    if stream:
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        choice = next(choice for choice in choices if choice["text"])
        assert "".join(choice["text"] for choice in choices) == prompt
    else:
        answer = json.loads(text)
        choice = answer["choices"][0]
        assert choice["text"] == prompt and answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(offline.tokenizer.encode(prompt))
    assert logprobs["token_logprobs"][0] is None and max(logprobs["token_logprobs"][1:]) <= 0
    whole = [i for i, token in enumerate(logprobs["tokens"]) if not token.startswith("bytes:")]
    for i in whole:
        assert prompt[logprobs["text_offset"][i] :].startswith(logprobs["tokens"][i])
    assert len(whole) < len(logprobs["tokens"])  # the smiley takes several tokens


def test_tokenize_and_back(server: RunningServer, offline: LLM) -> None:
    text = "Two strokes, one engine."
    tokens = server.post("/tokenize", {"prompt": text}).json()
    assert tokens["tokens"] == offline.tokenizer.encode(text) and tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": text}]
    assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == offline.chat_token_ids(messages)


def test_timing_says_where_the_time_went(server: RunningServer) -> None:
    prompt = "Every answer says how long it read and how long it wrote. " * 8
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    server.post("/v1/completions", body)
    response = server.post("/v1/completions", body)
    timing, usage = response.json()["timing"], response.json()["usage"]
    assert timing["prefill"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] >= 64
    assert timing["prefill"]["tokens"] + timing["prefill"]["cached_tokens"] == usage["prompt_tokens"]
    assert timing["decode"]["tokens"] == usage["completion_tokens"] == 12
    assert timing["queue_s"] + timing["prefill"]["seconds"] == pytest.approx(timing["ttft_s"], abs=1e-5)
    assert timing["ttft_s"] + timing["decode"]["seconds"] == pytest.approx(timing["total_s"], abs=1e-3)
    assert timing["decode"]["seconds"] / 11 == pytest.approx(timing["decode"]["tpot_s"], abs=1e-5)
    assert timing["decode"]["itl_p99_s"] >= timing["decode"]["tpot_s"] * 0.5
    for phase in ("prefill", "decode"):  # the machine's limits may have been measured in a busy moment
        assert 0 < timing[phase]["floor_s"] < 5 * timing[phase]["seconds"]
    assert timing["verdict"] and timing["cause"] in {cause.value for cause in Cause}
    shown = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert float(shown["decode"]) == pytest.approx(timing["decode"]["seconds"] * 1e3, abs=0.06)


def test_cache_salts_keep_prefixes_apart(server: RunningServer) -> None:
    def cached(salt: str) -> int:
        prompt = "A prefix that only one tenant has read before, long enough to fill blocks. " * 4
        answer = complete(server, prompt=prompt, max_tokens=1, cache_salt=salt)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0
    assert cached("alice") > 0
    assert cached("bob") == 0


def test_progress_is_streamed_while_the_prompt_is_read(server: RunningServer) -> None:
    body = {
        "prompt": [list(range(1000, 2500))],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_progress": True},
    }
    lines = server.post("/v1/completions", body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    steps = [event["prefill_progress"]["computed_tokens"] for event in events if "prefill_progress" in event]
    assert len(steps) >= 2 and steps == sorted(steps) and steps[-1] == 1500
    assert "timing" in events[-1]
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"


def test_progress_names_the_choice_whose_prompt_is_read(server: RunningServer) -> None:
    body = {
        "prompt": [list(range(1000, 1400)), list(range(3000, 3700)), list(range(5000, 5600))],
        "n": 2,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_progress": True},
    }
    lines = server.post("/v1/completions", body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    progress = [event["prefill_progress"] for event in events if "prefill_progress" in event]
    lengths = {step["index"] // 2: step["total_tokens"] for step in progress}
    assert lengths == {0: 400, 1: 700, 2: 600}


@pytest.mark.parametrize(
    ("path", "fields", "param", "sentence"),
    [
        ("/v1/chat/completions", {"stream_options": 5}, "stream_options", "it must be an object"),
        ("/v1/chat/completions", {"messages": [5]}, "messages[0]", "it must be an object"),
        ("/v1/completions", {"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [[1], [2, -1]]}, "prompt[1][1]", "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt[1]", "valid integer"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt[1]", "valid string"),
        ("/v1/completions", {"prompt": [[1], 1]}, "prompt[1]", "valid list"),
    ],
)
def test_a_wrong_value_is_named_by_its_place(
    server: RunningServer, path: str, fields: dict[str, object], param: str, sentence: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "max_tokens": 1, **fields}
    response = server.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and sentence in error["message"], error


def test_the_best_of_several(server: RunningServer) -> None:
    body = {"prompt": ["Once upon a", "The sea is"], "temperature": 1, "seed": 3, "max_tokens": 6, "logprobs": 0}
    every = complete(server, **body, n=5)
    means = [sum(found) / len(found) for found in (c["logprobs"]["token_logprobs"] for c in every["choices"])]
    best = complete(server, **body, n=2, best_of=5)
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    for prompt_index in (0, 1):
        own = range(prompt_index * 5, prompt_index * 5 + 5)
        ranked = sorted(own, key=lambda index: -means[index])[:2]
        found = [choice["text"] for choice in best["choices"][prompt_index * 2 : prompt_index * 2 + 2]]
        assert found == [every["choices"][index]["text"] for index in ranked]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 60  # all were written
    without = complete(server, **(body | {"logprobs": None, "echo": True}), n=2, best_of=5)
    assert [c["text"] for c in without["choices"]] == [
        body["prompt"][index // 2] + choice["text"] for index, choice in enumerate(best["choices"])
    ]
    assert all(choice["logprobs"] is None for choice in without["choices"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"prompt": ["a"] * 20, "best_of": 16}, "prompt"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_what_cannot_be_done_is_refused(server: RunningServer, fields: dict[str, object], param: str) -> None:
    response = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_counts_the_tokens_so_far(server: RunningServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7, "stream": True, "n": 2}
    body["speculation"] = "off"  # drafts that hold come several in a chunk
    lines = server.post(path, {**body, "temperature": 0, "stream_options": options}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    last = chunks[-1]["usage"]
    assert counts == sorted(counts) and counts[-1] == 14 and len(set(counts)) >= 7
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
