"""The live page's files without a browser: they parse, import each other and nobody else, and hold nothing that the
page's policy forbids."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

STATIC = Path(str(resources.files("twostroke.web") / "static"))
VENDOR = STATIC / "vendor"
MODULES = sorted(path for path in STATIC.rglob("*.js") if VENDOR not in path.parents)
SOURCES = sorted([*MODULES, *STATIC.glob("*.css"), *STATIC.glob("*.html")])
IMPORT = re.compile(r'^import (?:(\w+)|\{([^}]*)\}) from "([^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export \{([^}]*)\};$", re.MULTILINE)
NAMESPACE = "http://www.w3.org/2000/svg"
MOST_LINES = 300
NODE = shutil.which("node")


def names(listed: str) -> set[str]:
    return {name.strip().split(" as ")[-1] for name in listed.replace("\n", " ").split(",") if name.strip()}


def relative(path: Path) -> str:
    return str(path.relative_to(STATIC))


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_every_module_parses() -> None:
    script = (
        "const vm = require('node:vm'), fs = require('node:fs');"
        "for (const path of JSON.parse(process.argv[1]))"
        " new vm.SourceTextModule(fs.readFileSync(path, 'utf8'), { identifier: path });"
    )
    paths = json.dumps([str(path) for path in [*MODULES, *VENDOR.glob("*.js")]])
    command = [str(NODE), "--no-warnings", "--experimental-vm-modules", "-e", script, paths]
    parsed = subprocess.run(command, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.skipif(NODE is None, reason="needs node")
@pytest.mark.parametrize("name", ["modules_test.mjs", "interference_test.mjs"])
def test_modules_that_draw_nothing_do_what_they_say(name: str) -> None:
    file = Path(__file__).with_name(name)
    done = subprocess.run([str(NODE), "--no-warnings", "--test", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_what_a_module_imports_is_there(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    found = IMPORT.findall(text)
    forms = re.findall(r"^import\b|\bimport\(", text, re.MULTILINE)
    assert len(found) == len(forms), "one form, so that replay can inline them"
    for default, listed, target in found:
        assert target.startswith(("./", "../")), target
        path = (module.parent / target).resolve()
        assert path.is_file() and STATIC in path.parents, target
        if VENDOR not in path.parents and not default:
            [exported] = EXPORT.findall(path.read_text(encoding="utf-8"))
            assert names(listed) <= names(exported), target
    for _, listed, _ in found:
        body = IMPORT.sub("", text)
        for name in names(listed):
            assert re.search(rf"\b{name}\b", body), f"{name} is imported and not used"


def test_every_module_is_reached_from_the_page() -> None:
    reached, ahead = set(), [STATIC / "main.js"]
    while ahead:
        module = ahead.pop()
        if module in reached:
            continue
        reached.add(module)
        if VENDOR not in module.parents:
            targets = [target for *_, target in IMPORT.findall(module.read_text(encoding="utf-8"))]
            ahead += [(module.parent / target).resolve() for target in targets]
    assert set(MODULES) <= reached


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_a_source_is_readable_and_asks_nobody_else(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    assert not re.search(r"https?://", text.replace(NAMESPACE, "")), "no other host"
    assert len(text.splitlines()) <= MOST_LINES
    longest = max(len(line) for line in text.splitlines() if "data:image" not in line)
    assert longest <= 140, "sources are not minified"


@pytest.mark.parametrize("module", MODULES, ids=relative)
def test_text_never_becomes_html_or_code(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in text


def test_the_page_keeps_its_own_policy() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="/page/main.js">']
    assert "<style" not in page and not re.search(r"\s(style|on\w+)=", page)
    for path in re.findall(r'(?:href|src)="(/[^"]+)"', page):
        assert (STATIC / path.removeprefix("/page/")).is_file()


def test_vendored_files_have_their_licences_and_are_accounted_for() -> None:
    told = (VENDOR / "README.md").read_text(encoding="utf-8")
    for path in [*VENDOR.glob("*.js"), *VENDOR.glob("*.css")]:
        [row] = [line for line in told.splitlines() if line.startswith(f"| `{path.name}` |")]
        [licence] = re.findall(r"`([\w.-]+\.LICENSE)`", row)
        assert len((VENDOR / licence).read_text(encoding="utf-8")) > 500
