"""The live page's own files. They are the same for everybody and hold no data: that comes by `/watch`, with a key where
there are keys."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from twostroke.server.errors import ApiError
from twostroke.server.service import service_of
from twostroke.web.files import INDEX, PageFile, page_files

router = APIRouter()

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
    is_shown = service_of(request).settings.page_mode != "off" and INDEX in page_files()
    if not is_shown or "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse("Twostroke is running", headers={"Vary": "Accept"})
    return _file(request, page_files()[INDEX])


@router.get("/page/{name:path}", include_in_schema=False)
async def page_file(name: str, request: Request) -> Response:
    found = page_files().get(name)
    if service_of(request).settings.page_mode == "off" or found is None:
        raise ApiError(404, f"there is no {request.method} {request.url.path[:200]} here")
    return _file(request, found)


def _file(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "ETag": file.tag, "Vary": "Accept"}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.kind})
