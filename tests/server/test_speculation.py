"""Drafts by request, with the clients that people use: off, bounded, by method, refused by name; and what the engine
tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest
from openai import BadRequestError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import RunningServer
from tests.server.test_engine_process import Api, running_loop
from twostroke import SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.request import Request
from twostroke.engine.build import Assembly, build
from twostroke.server import messages as m
from twostroke.server.metrics import Metrics
from twostroke.speculation.budget import DraftBudget

MESSAGES: list[Any] = [{"role": "user", "content": "Repeat: red green blue red green blue red green blue"}]
OFF, NGRAM = "off", {"method": "ngram", "max_drafts": 4}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def chat(client: OpenAI, speculation: Any) -> Any:
    return client.chat.completions.create(
        model="smollm2", messages=MESSAGES, temperature=0, max_tokens=24, extra_body={"speculation": speculation}
    )


def test_openai_switches_drafts_by_request(client: OpenAI) -> None:
    """The text is the same, whoever drafts; and where nobody may, nobody did."""
    answers = [chat(client, said) for said in (None, OFF, {"max_drafts": 0}, "ngram", NGRAM, "auto", {})]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    for answer in answers[1:3]:
        assert answer.timing["decode"]["speculation"] is None
    for answer in answers:
        told = answer.timing["decode"]["speculation"]
        assert told is None or (told["drafts_held"] <= told["drafts_computed"] and told["tokens_per_step"] >= 1.0)


@pytest.mark.parametrize("route", ["chat", "completions", "responses"])
def test_openai_is_told_which_methods_there_are(client: OpenAI, route: str) -> None:
    extra: Any = {"extra_body": {"speculation": {"method": "eagle3"}}, "model": "smollm2"}
    with pytest.raises(BadRequestError) as refused:
        if route == "chat":
            client.chat.completions.create(messages=MESSAGES, stream=True, **extra)
        elif route == "completions":
            client.completions.create(prompt="Hi", **extra)
        else:
            client.responses.create(input="Hi", **extra)
    error: Any = refused.value.body
    assert refused.value.status_code == 400 and error["param"] == "speculation"
    assert "'eagle3' is not one that this engine was started with" in error["message"] and "ngram" in error["message"]


@pytest.mark.parametrize(
    ("said", "because"),
    [
        (5, "speculation"),
        ([], "speculation"),
        ({"method": 5}, "method"),
        ({"max_drafts": "4"}, "max_drafts"),
        ({"max_drafts": -1}, "max_drafts"),
        ({"max_drafts": 1000}, "max_drafts"),
        ({"num_drafts": 4}, "num_drafts"),
        ("", "method"),
    ],
)
def test_what_is_none_is_refused_by_name(server: RunningServer, said: Any, because: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "speculation": said})
    error = answer.json()["error"]
    assert answer.status_code == 400 and because in error["message"] and error["param"].startswith("speculation")


def test_the_other_apis_take_it_too(server: RunningServer) -> None:
    claude = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    fields: Any = {"model": "smollm2", "max_tokens": 24, "messages": MESSAGES}
    texts = {
        claude.messages.create(**fields, extra_body={"temperature": 0, "speculation": said}).content[0].text
        for said in (OFF, NGRAM)
    }
    assert len(texts) == 1
    with pytest.raises(anthropic.BadRequestError, match="'eagle3' is not one"):
        claude.messages.create(**fields, extra_body={"speculation": "eagle3"})
    llama = ollama.Client(host=server.address, timeout=60)
    options = {"temperature": 0, "num_predict": 24}
    for said in (OFF, NGRAM):
        answer = llama.chat("smollm2", MESSAGES, options={**options, "speculation": said})
        assert answer.message.content in texts
    with pytest.raises(ollama.ResponseError, match="'eagle3' is not one"):
        llama.generate("smollm2", "Hi", raw=True, options={**options, "speculation": "eagle3"})
    with pytest.raises(ollama.ResponseError, match=r"options\.speculation"):
        llama.generate("smollm2", "Hi", options={**options, "speculation": ""})


@pytest.fixture
def assembly(smollm2_path: Path) -> Iterator[Assembly]:
    """Drafts cost nothing here, so whoever has one computes it, however fast the machine is."""
    built = build("smollm2", EngineConfig(backend="cpu", max_context=512, kv=KVConfig(memory_bytes=100 * 10**6)))
    engine = built.engine
    engine.scheduler.draft(DraftBudget(lambda work: 1.0, 8, tuple(engine.draft_methods)))
    yield built
    built.engine.close()


def finished(api: Api, name: str, prompt: tuple[int, ...], **fields: Any) -> m.Stats:
    """The stats that follow its end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, **fields)
    api.send(m.Add(Request(name, prompt, sampling)))
    while not any(output.finish_reason for output in api.outputs(name)):
        api.listen()
    api.heard[:] = [message for message in api.heard if not isinstance(message, m.Stats)]
    while not api.heard or not isinstance(api.heard[-1], m.Stats):
        api.listen()
    return api.heard[-1]


def test_the_engine_counts_what_became_of_drafts(assembly: Assembly) -> None:
    assert assembly.tokenizer is not None
    prompt = tuple(assembly.tokenizer.encode("red green blue " * 20))
    with running_loop(assembly) as api:
        assert finished(api, "off", prompt, speculation="off").drafts == {}
        stats = finished(api, "on", prompt, speculation="ngram")
        plain, drafted = (next(o.timing for o in api.outputs(name) if o.timing) for name in ("off", "on"))
        assert [o.token_ids for o in api.outputs("off")] == [o.token_ids for o in api.outputs("on")]
        assert not plain.draft_steps and plain.wants_no_drafts and not drafted.wants_no_drafts
        assert drafted.tokens_per_step is not None and drafted.tokens_per_step > 1.5
        counts = stats.drafts["ngram"]
        assert sum(counts.computed) == drafted.drafts_computed and sum(counts.held) == drafted.drafts_held > 10
        assert sum(counts.lengths) == drafted.draft_steps
        assert counts.tokens == drafted.draft_steps + drafted.drafts_held
        assert stats.totals is not None and stats.totals.drafts_held == drafted.drafts_held
    metrics = Metrics()
    metrics.engine = stats
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    told = {
        name: sum(s.value for s in families[f"twostroke_{name}"].samples) for name in ("drafts_computed", "drafts_held")
    }
    assert told == {"drafts_computed": drafted.drafts_computed, "drafts_held": drafted.drafts_held}
    lengths = {
        sample.name: sample.value
        for sample in families["twostroke_accepted_length"].samples
        if not sample.labels.get("le")
    }
    assert lengths["twostroke_accepted_length_count"] == drafted.draft_steps
    assert lengths["twostroke_accepted_length_sum"] == counts.tokens


def test_positions_from_the_last_on_count_together() -> None:
    counts = m.DraftCounts.empty()
    counts.add(m.DRAFT_POSITIONS + 4, m.DRAFT_POSITIONS + 3)
    counts.add(2, 1)
    counts.add(3, 0)
    assert counts.computed[:3] == [2, 2, 1] and counts.computed[-1] == 5
    assert counts.held[:2] == [1, 1] and counts.held[-1] == 3
    assert (counts.lengths[0], counts.lengths[-1], counts.tokens) == (1, 1, m.DRAFT_POSITIONS + 4)


def test_a_method_that_the_engine_has_not_is_refused_there_too(assembly: Assembly) -> None:
    with running_loop(assembly) as api:
        api.send(m.Add(Request("bad", (1, 2, 3), SamplingParams(speculation="eagle3"))))
        while not any(isinstance(message, m.Refused) for message in api.heard):
            api.listen()
        refused = next(message for message in api.heard if isinstance(message, m.Refused))
        assert refused.is_bad_request and "'eagle3' is not one that this engine was started with" in refused.message
