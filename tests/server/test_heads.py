"""What the head of a request may say: a host that is this server's, a page that may ask, one length, an id."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from tests.server.hostile import connect
from tests.server.running import CLIENT, RunningServer
from twostroke.server.errors import ApiError
from twostroke.server.heads import HeadCheck, as_routed, host_name, is_loopback, request_id
from twostroke.server.settings import ServerSettings


def scope(method: str = "GET", **headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"method": method, "headers": named, "http_version": "1.1", "raw_path": b"/version", "path": "/version"}


def refusal(settings: ServerSettings, asked: dict[str, Any]) -> tuple[int, str] | None:
    try:
        HeadCheck(settings).check(asked)
    except ApiError as error:
        return error.status_code, error.message
    return None


def refused_host(settings: ServerSettings, host: str) -> bool:
    found = refusal(settings, scope(host=host))
    assert found is None or (found[0] == 421 and host[:20] in found[1] and "--allowed-host" in found[1])
    return found is not None


OURS = (
    "localhost",
    "LocalHost:8000",
    "127.0.0.1",
    "127.8.9.1:80",
    "[::1]",
    "[::1]:8000",
    "localhost.",
    "a.localhost:1",
)
STRANGE = ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]", "", ":8000", "[::1")


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_an_open_server_on_this_machine_answers_for_this_machine_alone(bound: str) -> None:
    """Else any page on the web could have its name resolve here, and read what is answered (DNS rebinding)."""
    settings = ServerSettings("small", host=bound)
    assert not any(refused_host(settings, host) for host in OURS)
    assert all(refused_host(settings, host) for host in STRANGE)
    assert refusal(settings, scope()) is None  # HTTP/1.0, which no browser speaks


def test_other_hosts_are_allowed_by_name() -> None:
    settings = ServerSettings("small", allowed_hosts=("gpu.example", "Box.example:8000"))
    assert not any(refused_host(settings, host) for host in (*OURS, "GPU.example:443", "box.example"))
    assert all(refused_host(settings, host) for host in STRANGE)
    assert not any(refused_host(ServerSettings("small", allowed_hosts=("*",)), host) for host in STRANGE)


@pytest.mark.parametrize("options", [{"api_keys": ("a-key",)}, {"host": "0.0.0.0"}])
def test_hosts_are_not_checked_where_keys_are_or_others_are_let_in(options: dict[str, Any]) -> None:
    assert not any(refused_host(ServerSettings("small", **options), host) for host in (*OURS, *STRANGE))
    named = ServerSettings("small", **options, allowed_hosts=("gpu.example",))  # unless names are given
    assert refused_host(named, "evil.example") and not refused_host(named, "gpu.example")


def test_a_bound_name_is_known_by_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"box": "127.0.1.1", "lan": "192.168.0.7"}

    def resolve(host: str, port: object) -> list[tuple[object, ...]]:
        if host not in address:
            raise socket.gaierror
        return [(0, 0, 0, "", (address[host], 0))]

    monkeypatch.setattr("twostroke.server.loopback.socket.getaddrinfo", resolve)
    assert is_loopback("box") and not is_loopback("lan") and not is_loopback("nowhere") and not is_loopback("")
    assert refused_host(ServerSettings("small", host="box"), "evil.example")
    assert not refused_host(ServerSettings("small", host="box"), "box:8000")
    assert not refused_host(ServerSettings("small", host="lan"), "evil.example")


@pytest.mark.parametrize(
    ("origin", "is_taken"),
    [
        *[("https://evil.example", False), ("http://evil.example:8000", False), ("null", False), ("http://", False)],
        *[("http://localhost:3000", True), ("http://127.0.0.1:1", True), ("http://[::1]", True)],
        *[("https://page.example", True), ("vscode-webview://abc", True), ("chrome-extension://abc", True)],
    ],
)
def test_a_page_of_another_site_cannot_post(origin: str, is_taken: bool) -> None:
    settings = ServerSettings("small", cors_origins=("https://page.example",))
    found = refusal(settings, scope("POST", host="localhost", origin=origin))
    assert (found is None) == is_taken
    assert found is None or (found[0] == 403 and "--cors" in found[1])
    assert refusal(settings, scope("GET", host="localhost", origin=origin)) is None  # which changes nothing
    keyed = ServerSettings("small", api_keys=("a-key",))
    assert refusal(keyed, scope("POST", host="localhost", origin=origin)) is None
    assert refusal(ServerSettings("small", cors_origins=("*",)), scope("POST", host="localhost", origin=origin)) is None


def test_a_page_that_came_from_the_same_host_may_post() -> None:
    settings = ServerSettings("small", host="0.0.0.0")
    assert refusal(settings, scope("POST", host="box.example:8000", origin="http://box.example:3000")) is None
    assert refusal(settings, scope("POST", host="box.example:8000", origin="http://evil.example")) is not None


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é", "\x7f"])
def test_an_id_that_is_none_is_refused(given: str) -> None:
    asked = scope(host="localhost", x_request_id=given)
    found = refusal(ServerSettings("small"), asked)
    assert found is not None and found[0] == 400 and "x-request-id" in found[1]
    assert request_id(asked["headers"]).startswith("req_")  # under which it is answered and logged


def test_names_of_hosts() -> None:
    assert [host_name(given) for given in ("A.b:1", "[::1]:2", "::1", "a.", "")] == ["a.b", "::1", "::1", "a", ""]


def test_a_target_may_name_its_host() -> None:
    absolute = {**scope(host="localhost"), "raw_path": b"HTTP://evil.example:80/v1/a%20b", "path": "http://..."}
    routed = as_routed(absolute)
    assert (routed["path"], routed["raw_path"]) == ("/v1/a b", b"/v1/a%20b")
    assert routed["headers"] == [(b"host", b"evil.example:80")]  # RFC 9112: it holds, whatever the header says
    assert as_routed({**absolute, "raw_path": b"http://localhost"})["path"] == "/"


# The same at a real server


def talk(server: RunningServer, said: bytes, *, closes: bool = True) -> bytes:
    """What it answers until it closes the connection, or the answer is whole."""
    received = b""
    with connect(server.address) as connection, contextlib.suppress(ConnectionError):
        connection.settimeout(120)
        connection.sendall(said)
        while closes or b"}" not in received:
            piece = connection.recv(1 << 16)
            received += piece
            if not piece:
                return received
    return received


def test_a_rebound_name_gets_no_answer(server: RunningServer) -> None:
    for path in ("/v1/models", "/health", "/v1/twostroke/requests/last"):
        refused = server.get(path, headers={"Host": "evil.example"})
        assert refused.status_code == 421 and refused.json()["error"]["code"] == "host_not_allowed"
    posted = server.post("/tokenize", {"prompt": "a"}, headers={"Host": "evil.example:8000"})
    assert posted.status_code == 421 and "tokens" not in posted.text
    rebound = talk(server, b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", closes=False)
    assert rebound.startswith(b"HTTP/1.1 421 ")
    assert server.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200


def test_a_page_of_another_site_gets_no_answer(server: RunningServer) -> None:
    """A form may post plain text to anywhere without asking; and a body that is called JSON is asked about first."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    for kind, status in (("text/plain", 415), ("application/json", 200)):
        url, headers = f"{server.base_url}/completions", {"Content-Type": kind}
        assert CLIENT.post(url, content=body, headers=headers).status_code == status
        refused = CLIENT.post(url, content=body, headers={**headers, "Origin": "https://evil.example"})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"


def test_absolute_targets_are_routed(server: RunningServer) -> None:
    authority = server.address.removeprefix("http://").encode()
    said = b"GET http://%b/v1/models?a=b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (authority, authority)
    assert talk(server, said).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/version", "/v1/models/smollm2"])
def test_head_is_get_without_its_body(server: RunningServer, path: str) -> None:
    head, got = CLIENT.head(server.address + path), server.get(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"] and "content-length" in head.headers
    assert CLIENT.head(f"{server.base_url}/completions").status_code == 405


@pytest.mark.parametrize(
    ("version", "lengths"),
    [("1.1", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), ("1.0", b"Transfer-Encoding: chunked\r\n")],
)
def test_a_body_of_two_lengths_ends_the_connection(server: RunningServer, version: str, lengths: bytes) -> None:
    """What follows would be a request of its own to one reader, and a part of the body to another."""
    smuggled = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /tokenize HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    answer = talk(server, head + lengths + b"\r\n" + smuggled)
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 400 ") and b"Transfer-Encoding" in answer
