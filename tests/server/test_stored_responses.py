"""Responses that are kept: gone on from, shown again, listed and deleted, by the key that asked for them and nobody
else; what is kept is bounded, and nobody can push out what another keeps."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.running import CLIENT, RunningServer
from twostroke.server.response_store import ResponseStore, StoredResponse, Turn

TOOLS: list[Any] = [{"type": "function", "name": "roll_dice", "parameters": {"type": "object"}}]
MAX_STORED = 5
"""As the server was told."""


@pytest.fixture(scope="module")
def server(keyed_server: RunningServer) -> RunningServer:
    return keyed_server


def client_of(server: RunningServer, key: str) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return client_of(server, "one")


def test_a_conversation_goes_on_by_its_id(client: OpenAI) -> None:
    """The model reads the same as when the conversation is sent whole: thoughts, calls and results."""
    first = client.responses.create(model="scripted", input="Roll!", tools=TOOLS, instructions="Be brief.")
    call = next(item for item in first.output if item.type == "function_call")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    second = client.responses.create(model="scripted", input=[result], tools=TOOLS, previous_response_id=first.id)
    assert second.previous_response_id == first.id and second.store
    third = client.responses.create(model="scripted", input="And?", tools=TOOLS, previous_response_id=second.id)
    whole: list[Any] = [{"role": "user", "content": "Roll!"}, *first.output, result, *second.output]
    whole.append({"role": "user", "content": "And?"})
    sent = client.responses.create(model="scripted", input=whole, tools=TOOLS, store=False)
    assert third.usage.input_tokens == sent.usage.input_tokens > second.usage.input_tokens
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.type for item in items] == [
        *("message", "function_call", "message", "function_call_output"),
        *(item.type for item in second.output),
        "message",
    ]
    assert items[-1].content[0].text == "And?"
    pages = client.responses.input_items.list(third.id, limit=2)
    assert [item.id for item in pages] == [item.id for item in reversed(items)]  # the client asks for page after page


def test_a_response_is_shown_again_and_deleted(client: OpenAI) -> None:
    with client.responses.stream(model="scripted", input="Ponder this.", metadata={"a": "b"}) as stream:
        final = stream.get_final_response()
    shown = client.responses.retrieve(final.id)
    assert shown.output_text == final.output_text and shown.metadata == {"a": "b"} and shown.usage == final.usage
    assert [item.id for item in shown.output] == [item.id for item in final.output]
    after = client.responses.create(model="scripted", input="And?", previous_response_id=final.id)
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(final.id)
    again = client.responses.create(model="scripted", input="And?", previous_response_id=after.id)
    assert again.usage.input_tokens > after.usage.input_tokens  # what went on from it still has its turn


def test_what_is_not_to_be_kept_is_not(client: OpenAI) -> None:
    answer = client.responses.create(model="scripted", input="Hi.", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_another_keys_response_is_like_none(server: RunningServer, client: OpenAI) -> None:
    mine, other = client.responses.create(model="scripted", input="Hi."), {"Authorization": "Bearer two"}

    def told(method: str, path: str, body: object = None) -> Any:
        answer = CLIENT.request(method, f"{server.base_url}{path}", headers=other, json=body)
        return answer.status_code, answer.json()

    for method, path in (("GET", "/responses/{}"), ("DELETE", "/responses/{}"), ("GET", "/responses/{}/input_items")):
        unknown = told(method, path.format("resp_" + "0" * 32))
        found = told(method, path.format(mine.id))
        assert found[0] == unknown[0] == 404
        assert str(found[1]).replace(mine.id, "") == str(unknown[1]).replace("resp_" + "0" * 32, "")
    status, body = told("POST", "/responses", {"input": "Hi.", "previous_response_id": mine.id})
    assert status == 404 and body["error"]["param"] == "previous_response_id"
    reference = [{"type": "item_reference", "id": mine.output[0].id}]
    status, body = told("POST", "/responses", {"input": reference})
    assert status == 404 and body["error"]["param"] == "input[0].id"
    assert client.responses.retrieve(mine.id).id == mine.id


def test_items_are_named_by_their_id(client: OpenAI) -> None:
    """As the JavaScript clients send a conversation that was kept."""
    first = client.responses.create(model="scripted", input="Hello.")
    question: Any = {"role": "user", "content": "Hello."}
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    named = client.responses.create(model="scripted", input=[question, *references, question])
    sent = client.responses.create(model="scripted", input=[question, *first.output, question])  # type: ignore[list-item]
    assert named.usage.input_tokens == sent.usage.input_tokens


def test_few_ids_cannot_stand_for_a_flood(server: RunningServer, client: OpenAI) -> None:
    kept = client.responses.create(model="scripted", input="a" * 2000, max_output_tokens=1)
    item_id = client.responses.input_items.list(kept.id).data[0].id
    body = {"input": [{"type": "item_reference", "id": item_id}] * 800}
    answer = server.post("/v1/responses", body, headers={"Authorization": "Bearer one"})
    assert answer.status_code == 413 and "kept items" in answer.json()["error"]["message"], answer.text


def test_only_so_many_are_kept(client: OpenAI) -> None:
    ids = [client.responses.create(model="scripted", input="Hi.").id for _ in range(MAX_STORED + 1)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert client.responses.retrieve(ids[1]).id == ids[1]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("?stream=perhaps", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, client: OpenAI, path: str, param: str) -> None:
    kept = client.responses.create(model="scripted", input="Hi.").id
    answer = server.get(f"/v1/responses/{kept}{path}", headers={"Authorization": "Bearer one"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_cannot_be_sent_back_is_not_kept(server: RunningServer) -> None:
    part = '{"type": "input_text", "text": "Hi.", "note": "\\ud800"}'
    content = f'{{"input": [{{"role": "user", "content": [{part}]}}], "max_output_tokens": 1}}'
    headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
    answer = CLIENT.post(f"{server.base_url}/responses", content=content, headers=headers)
    assert answer.status_code == 200, answer.text


# The store alone


def stored(name: str, size: int, earlier: tuple[Turn, ...] = ()) -> StoredResponse:
    turn = Turn.of([{"id": f"msg_{name}", "text": "x" * size}], [{"id": f"out_{name}", "text": ""}])
    return StoredResponse(name, b"{}", (*earlier, turn))


def test_nobody_can_push_out_what_another_keeps() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100_000)
    store.keep(1, stored("mine", 1000))
    for number in range(1000):
        store.keep(2, stored(f"r{number}", 20 if number % 2 else 30_000))
        assert len(store) <= 10 and store.num_bytes <= 100_000
    assert store.find(1, "mine") is not None and store.find(2, "r999") is not None and store.find(2, "r900") is None
    assert store.find(2, "mine") is None and store.find_item(2, "msg_mine") is None


def test_a_turn_counts_once_and_as_long_as_it_is_used() -> None:
    store = ResponseStore(max_responses=100, max_bytes=10**6)
    response = stored("r0", 50_000)
    store.keep(1, response)
    first_bytes = store.num_bytes
    for number in range(1, 20):
        response = stored(f"r{number}", 10, response.turns)
        store.keep(1, response)
    assert store.num_bytes < first_bytes + 20 * 5000
    for number in range(19):
        assert store.delete(1, f"r{number}") and not store.delete(1, f"r{number}")
    assert len(response.conversation()) == 40 and store.find_item(1, "msg_r0") is not None
    assert store.num_bytes > 50_000
    assert store.delete(1, "r19") and store.num_bytes == 0 and store.find_item(1, "msg_r0") is None


def test_one_too_large_is_not_kept() -> None:
    store = ResponseStore(max_responses=10, max_bytes=10_000)
    store.keep(1, stored("large", 20_000))
    assert len(store) == 0 == store.num_bytes
