"""The page and a record of steps as one HTML file that plays without a server and asks nobody for anything. Its modules
become data: URLs, named by an import map; scripts and styles are let in by their hashes."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from posixpath import dirname, join, normpath

from twostroke.core.errors import BadRequestError
from twostroke.web.files import INDEX, PageFile
from twostroke.web.recording import Recording

_SPECIFIER = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])(\.{1,2}/[^"']+)\2""")
"""What a module imports by a relative name, in all forms that stand at its top."""
_LINK = re.compile(r"<link\b[^>]*>", re.IGNORECASE)
_SCRIPT = re.compile(r"<script\b[^>]*\bsrc=[^>]*>\s*</script>", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""\b(href|src|rel)\s*=\s*(?:"([^"]*)"|'([^']*)')""", re.IGNORECASE)
_HEAD = re.compile(r"<head\b[^>]*>", re.IGNORECASE)
_SERVED = "/page/"


def bundle(recording: Recording, files: Mapping[str, PageFile]) -> str:
    """`files`: the page's, by name."""
    if INDEX not in files:
        raise BadRequestError("this build of Twostroke has no page: a replay needs its files")
    page = _Bundle(files)
    html = _LINK.sub(lambda tag: page.link(tag[0]), files[INDEX].content.decode())
    html = _SCRIPT.sub(lambda tag: page.script(tag[0], recording), html)
    scripts, styles = " ".join(page.script_hashes), " ".join(page.style_hashes) or "'none'"
    policy = (
        f"default-src 'none'; script-src {scripts} data:; style-src {styles}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return _HEAD.sub(lambda tag: f"{tag[0]}\n{head}", html, count=1)


class _Bundle:
    def __init__(self, files: Mapping[str, PageFile]) -> None:
        self._files = files
        self.script_hashes: list[str] = []
        self.style_hashes: list[str] = []

    def link(self, tag: str) -> str:
        attributes = _attributes(tag)
        rel, address = attributes.get("rel", ""), attributes.get("href", "")
        if address.startswith("data:"):
            return tag
        name = self._name(address)
        if rel == "stylesheet":
            text = self._text(name)
            self.style_hashes.append(_hash(text))
            return f"<style>{text}</style>"
        if rel == "icon":
            return f'<link rel="icon" href="{_data_url(self._file(name))}">'
        return ""  # what is to be fetched ahead is here

    def script(self, tag: str, recording: Recording) -> str:
        """The page's one script: the record, the modules and the line that begins."""
        entry = self._name(_attributes(tag).get("src", ""))
        modules = {f"page/{name}": _as_data_url(text) for name, text in self._modules(entry).items()}
        import_map, begin = _in_html(json.dumps({"imports": modules})), f'import "page/{entry}";'
        self.script_hashes += [_hash(import_map), _hash(begin)]
        events = _in_html(json.dumps(recording.events, separators=(",", ":")))
        return (
            f'<script type="application/json" id="recording">{events}</script>\n'
            f'<script type="importmap">{import_map}</script>\n<script type="module">{begin}</script>'
        )

    def _modules(self, entry: str) -> dict[str, str]:
        """All that are reached from the first, with names in place of paths."""
        found: dict[str, str] = {}
        waiting = [entry]
        while waiting:
            name = waiting.pop()
            if name in found:
                continue
            needed: list[str] = []

            def renamed(match: re.Match[str], name: str = name, needed: list[str] = needed) -> str:
                target = normpath(join(dirname(name), match[3]))
                needed.append(target)
                return f"{match[1]}{match[2]}page/{target}{match[2]}"

            found[name] = _SPECIFIER.sub(renamed, self._text(name))
            waiting += needed
        return found

    def _name(self, address: str) -> str:
        if not address.startswith(_SERVED):
            raise BadRequestError(f"the page names {address!r:.80}, which is none of its files")
        return address.removeprefix(_SERVED)

    def _file(self, name: str) -> PageFile:
        if name not in self._files:
            raise BadRequestError(f"the page needs {name!r:.80}, and has no such file")
        return self._files[name]

    def _text(self, name: str) -> str:
        return self._file(name).content.decode()


def _attributes(tag: str) -> dict[str, str]:
    return {name.lower(): double or single for name, double, single in _ATTRIBUTE.findall(tag)}


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _in_html(text: str) -> str:
    """JSON that cannot end the element that it stands in, nor begin another."""
    return text.replace("<", "\\u003c")


def _as_data_url(module: str) -> str:
    return f"data:text/javascript;charset=utf-8;base64,{b64encode(module.encode()).decode()}"


def _data_url(file: PageFile) -> str:
    return f"data:{file.kind.replace(' ', '')};base64,{b64encode(file.content).decode()}"
