"""The live page's own files. They are the same for everybody and hold no data: that comes by `/watch`, with a key where
there are keys."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from twostroke.server.errors import ApiError
from twostroke.server.service import service_of
from twostroke.server.settings import PageMode
from twostroke.web.files import INDEX, PageFile, page_files

router = APIRouter()

RUNNING = "Twostroke is running"
OFF = "It shows no live page: --page view, or --page full, gives one to everybody whom this server lets in."

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads from here alone, runs no script that stands in a page, sends to nowhere else, and lies in no frame."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """The page, for browsers; for Ollama's clients, which ask whether somebody is there, a line."""
    mode, file = service_of(request).settings.page_mode, page_files().get(INDEX)
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(RUNNING, headers={"Vary": "Accept"})
    if mode == "off" or file is None:
        return PlainTextResponse(f"{RUNNING}\n\n{OFF}\n", headers={"Vary": "Accept"})
    return _file(request, _index_of(file, mode))


@router.get("/page/{name:path}", include_in_schema=False)
async def page_file(name: str, request: Request) -> Response:
    found = page_files().get(name)
    if service_of(request).settings.page_mode == "off" or found is None:
        raise ApiError(404, f"there is no {request.method} {request.url.path[:200]} here")
    return _file(request, found)


def _index_of(file: PageFile, mode: PageMode) -> PageFile:
    """It says what the page may do, so that it never shows what it may not, not even before its stream has begun."""
    content = file.content.replace(b"<html ", b'<html data-page="' + mode.encode() + b'" ', 1)
    return replace(file, content=content, tag=f'"{mode}-{file.tag[1:]}')


def _file(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "ETag": file.tag, "Vary": "Accept"}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.kind})
