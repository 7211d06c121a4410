"""The documents name things that exist: every relative link, every path in backticks; their Python compiles, and what
they quote from the code still stands there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "twostroke"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BACKTICKS = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")
COMMIT = re.compile(r"\b(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{7,40}\b")
MAX_LINE, MAX_ROW = 130, 420
SUFFIXES = (".py", ".md", ".txt", ".toml", ".sh")


def prose_of(text):
    """The text without its code blocks."""
    return FENCE.sub("", text)


def broken_links(document, text):
    """Relative links that lead nowhere; a `#section` must be a heading of the document it leads to."""
    broken = []
    for link in LINK.findall(prose_of(text)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, section = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists() or (section and section not in headings(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def headings(text):
    """As Markdown hosts name them in links: lower case, words joined by hyphens."""
    titles = re.findall(r"^#+ (.+)$", prose_of(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing_paths(text):
    """Paths in backticks that are nowhere: not in the repository, nor in the package, whose folders prose calls rooms.
    A name with a slash or one of our suffixes counts as a path when it begins like something of ours."""
    missing = []
    for quoted in BACKTICKS.findall(prose_of(text)):
        name = quoted.rstrip("/")
        if PATH.fullmatch(quoted) is None or not (quoted.endswith(SUFFIXES) or _begins_like_ours(quoted)):
            continue
        if name.endswith(".py") and "/" not in name:
            found = any(PACKAGE.rglob(name)) or any((ROOT / "tests").rglob(name))
        else:
            found = any((folder / name).exists() for folder in (ROOT, PACKAGE))
        if not found:
            missing.append(quoted)
    return missing


def _begins_like_ours(name):
    head, slash, _ = name.partition("/")
    return bool(slash) and any((folder / head).is_dir() for folder in (ROOT, PACKAGE))


def python_blocks(text):
    return [code for language, code in FENCE.findall(text) if language == "python"]


def false_quotes(text):
    """A Python block that begins with the comment `# room/file.py` quotes that file: its lines that the file has not.
    `...` stands for what was left out, and how far a line is indented does not matter."""
    false = []
    for code in python_blocks(text):
        name = _quoted_file(code)
        if name is not None:
            source = (PACKAGE / name).read_text(encoding="utf-8").splitlines()
            stands = {line.strip() for line in source} | {"", "..."}
            false += [line for line in code.splitlines()[1:] if line.strip() not in stands]
    return false


def _quoted_file(code):
    match = re.match(r"# (\S+\.py)\n", code)
    return match[1] if match else None


def test_the_documents_were_found():
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "tour.md",
        "architecture.md",
        "metrics.md",
        "roadmap.md",
    } <= {document.name for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_named_paths_exist(document):
    assert missing_paths(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_python_blocks_compile(document):
    for code in python_blocks(document.read_text(encoding="utf-8")):
        if _quoted_file(code) is None:
            compile(code, document.name, "exec")
        else:
            ast.parse(code)  # a quote may `return` without the function around it


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_quotes_are_true_to_the_code(document):
    assert false_quotes(document.read_text(encoding="utf-8")) == []


def hard_to_read(text):
    """Prose in lines that no screen holds, rows of a table that nobody reads, hashes of commits."""
    found = []
    for line in prose_of(text).splitlines():
        limit = MAX_ROW if line.lstrip().startswith(("|", ">")) else MAX_LINE
        if len(line) > limit or COMMIT.search(line):
            found.append(line)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_stranger_can_read_it(document):
    if document.name != "clients.md":  # made of scripts and versions
        assert hard_to_read(document.read_text(encoding="utf-8")) == []


def test_no_merge_was_left_half_done():
    for document in [*DOCUMENTS, *(ROOT / "bench").glob("**/README.md")]:
        lines = document.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("<" * 7 + " ", ">" * 7 + " "))], document.name


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md", "docs/performance-gpu.md", "docs/trials.md"])
def test_figures_have_records_not_numbers_of_runs(name):
    assert re.findall(r"\bruns? \d+", prose_of((ROOT / name).read_text(encoding="utf-8"))) == []


def test_the_readme_shows_python():
    assert python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def test_what_is_wrong_is_noticed():
    text = "[a](docs/none.md) [b](#nowhere) [c](README.md) `core/none.py` `none.py` `kv/none/` `core/step.py` `plan.py`"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "#nowhere"]
    assert missing_paths(text) == ["core/none.py", "none.py", "kv/none/"]
    assert python_blocks("```python\nx = (\n```\n") == ["x = (\n"]
    quote = "```python\n# core/step.py\nclass Step:\n    ...\n    step_id: str\n```\n"
    assert false_quotes(quote) == ["    step_id: str"]


def test_what_is_hard_to_read_is_noticed():
    assert hard_to_read("short\n" + "long " * 40) == ["long " * 40]
    assert hard_to_read("at commit bbed15d\n| " + "x" * 200 + " |\n| " + "x" * 500 + " |") == [
        "at commit bbed15d",
        "| " + "x" * 500 + " |",
    ]
    assert hard_to_read("1234567 tokens, effaced\n```\n" + "x" * 300 + "\n```\n") == []


def test_what_is_no_path_of_ours_is_let_be():
    assert missing_paths("`org/name` `make run` `n / 2` `~/.cache/twostroke` `config.json` `i + d / 2`") == []
