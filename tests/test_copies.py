"""No block of code stands twice: what two places share is one function, one value or one base class."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "twostroke"
SHORTEST = 8
"""Lines of a block: fewer are often the same by chance."""
ALLOWED = {
    ("backends/cuda/recurrent_rules.py", "backends/cuda/recurrent_rules.py", "def decode("): (9, "`Rule` asks for it"),
    ("backends/cuda/latent.py", "backends/cuda/mixers.py", "def decode("): (10, "a decoder calls either path so"),
    ("scheduling/pace.py", "scheduling/pace.py", "def open("): (8, "`Pace` asks for it"),
}
"""By the two files and the first line: the most lines of a copy that stands, and why it does."""
_NO_CODE = re.compile(r"#|\W*$")
_IMPORT = re.compile(r"(import|from) [\w.]+")
_CLOSED = re.compile(r"\)$")
_SIGNATURE_END = re.compile(r"\).*:$")


class Line(NamedTuple):
    number: int
    code: str


class Copy(NamedTuple):
    first: str
    first_line: int
    second: str
    second_line: int
    length: int
    opening: str

    @property
    def is_allowed(self) -> bool:
        most, _ = ALLOWED.get((self.first, self.second, self.opening), (0, ""))
        return self.length <= most

    def __str__(self) -> str:
        places = f"{self.first}:{self.first_line} and {self.second}:{self.second_line}"
        return f"{self.length} lines stand at {places}, from `{self.opening}` on"


def code_lines(text: str) -> Iterator[Line]:
    """Without white space, comments, lone punctuation and imports; without what a kernel is given, which its launch
    lists too."""
    until: re.Pattern[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        code = " ".join(line.split())
        if until is not None:
            until = None if until.search(code) else until
        elif _IMPORT.match(code):
            until = _CLOSED if code.endswith("(") else None
        elif code.startswith("@") and "jit" in code:
            until = _SIGNATURE_END
        elif not _NO_CODE.match(code):
            yield Line(number, code)


def copies(texts: Mapping[str, str]) -> list[Copy]:
    """The longest runs of lines that two places have alike."""
    lines = {name: list(code_lines(text)) for name, text in sorted(texts.items())}
    places = defaultdict(list)
    for name, own in lines.items():
        for start in range(len(own) - SHORTEST + 1):
            places[tuple(line.code for line in own[start : start + SHORTEST])].append((name, start))
    found = []
    for block in places.values():
        for index, (first, start) in enumerate(block):
            for second, other in block[index + 1 :]:
                one, two = lines[first], lines[second]
                if start and other and one[start - 1].code == two[other - 1].code:
                    continue  # a run that began before
                length = _alike(one[start:], two[other:])
                if first == second:
                    length = min(length, other - start)
                if length >= SHORTEST:
                    found.append(Copy(first, one[start].number, second, two[other].number, length, one[start].code))
    return found


def _alike(one: list[Line], two: list[Line]) -> int:
    """How many lines, from the first on."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((index for index, (a, b) in pairs if a.code != b.code), min(len(one), len(two)))


def sources() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def test_no_block_stands_twice() -> None:
    texts = sources()
    assert len(texts) > 500
    assert [str(copy) for copy in copies(texts) if not copy.is_allowed] == []


def test_a_planted_copy_is_found() -> None:
    """In a file of its own and behind its original, with other white space, comments and imports."""
    texts = sources()
    file = "kv/ledger.py"
    block = [line for line in texts[file].splitlines() if line.strip()][-40:]
    planted = "\n".join(f"\n    # from elsewhere\n    {line}\nimport math" for line in block)
    beside = copies({**texts, "kv/planted.py": planted})
    assert max(copy.length for copy in beside if copy.second == "kv/planted.py" and copy.first == file) > 20
    behind = copies({**texts, file: f"{texts[file]}\n{planted}"})
    assert max(copy.length for copy in behind if copy.first == copy.second == file) > 20


def test_what_is_short_or_no_code_is_none() -> None:
    numbers = [f"value_{index} = {index}" for index in range(SHORTEST)]
    imports = "from math import (\n" + "".join(f"    name_{index},\n" for index in range(SHORTEST)) + ")\n"
    kernel = "@triton.jit\ndef kernel(\n" + "".join(f"    place_{index},\n" for index in range(SHORTEST)) + "):\n"
    assert copies({"a.py": imports + kernel, "b.py": imports + kernel}) == []
    assert copies({"a.py": "\n".join(numbers[:-1]), "b.py": "\n".join(numbers[:-1])}) == []
    (found,) = copies({"a.py": "\n".join([*numbers, "# its own", "a = 1"]), "b.py": "\n\n".join(["b = 1", *numbers])})
    assert str(found) == f"{SHORTEST} lines stand at a.py:1 and b.py:3, from `value_0 = 0` on"


def test_the_dark_colours_are_told_twice_alike() -> None:
    """Once for whoever chose them, once for a system that is dark: a style sheet can say neither through the other."""
    style = (SOURCE / "web" / "static" / "theme.css").read_text(encoding="utf-8")
    chosen, systems = (
        re.findall(r"[\w-]+: [^;]+;", style.partition(selector)[2].partition("}")[0])
        for selector in (':root[data-theme="dark"] {', ':root:not([data-theme="light"]) {')
    )
    assert len(chosen) > 30 and chosen == systems
