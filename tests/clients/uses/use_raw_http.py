"""HTTP/1.1 by hand: an answer, a stream event by event, one connection for several requests, a pipelined pair, and
refusals that leave the connection usable."""

import socket
from urllib.parse import urlsplit

from given import ADDRESS, API_KEY, MODEL, finish, part

HOST, PORT = urlsplit(ADDRESS).hostname, urlsplit(ADDRESS).port

with part("chat"):
    # shown
    import json
    import urllib.request

    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 40}
    headers = {"Authorization": f"Bearer {API_KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode(), headers)
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
    # end

with part("stream"):
    body = {**body, "temperature": 0, "stream": True}
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert len(pieces) > 10 and "".join(pieces)

with part("several requests on one connection, refusals among them"):
    import http.client

    connection = http.client.HTTPConnection(HOST, PORT, timeout=60)
    paths = []
    for path, told, expected in (
        ("/v1/models", headers, 200),
        ("/v1/models", {}, 401),
        ("/v1/models/none", headers, 404),
        ("/v1/models", headers, 200),
    ):
        connection.request("GET", path, headers=told)
        local = connection.sock.getsockname() if connection.sock else None
        response = connection.getresponse()
        response.read()
        assert response.status == expected, (path, response.status)
        paths.append(local)
    assert len(set(paths)) == 1, "a connection was closed"
    connection.close()

with part("body in chunks"):
    connection = http.client.HTTPConnection(HOST, PORT, timeout=60)
    text = json.dumps({**body, "stream": False}).encode()
    connection.request("POST", "/v1/chat/completions", iter([text[:20], text[20:]]), headers, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 200 and json.load(response)["choices"]
    connection.close()

with part("two requests sent at once"):
    ask = f"GET /v1/models HTTP/1.1\r\nHost: {HOST}:{PORT}\r\nAuthorization: Bearer {API_KEY}\r\n"
    with socket.create_connection((HOST, PORT), timeout=20) as plain:
        plain.sendall(f"{ask}\r\n{ask}Connection: close\r\n\r\n".encode())
        got = b"".join(iter(lambda: plain.recv(65536), b""))
    assert got.count(b"HTTP/1.1 200 OK") == 2

finish()
