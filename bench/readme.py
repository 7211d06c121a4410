"""The README's transcripts: `python -m bench.readme` (make readme) runs each command through `bench/record.sh`, which
keeps what it printed with date, machine and versions, and puts that into the README, whose picture is drawn anew. Tests
hold that the README shows the records, and that the commands answer today as the records have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "bench" / "results"
WIDTH = 100
_BEHIND_ANSWER = re.compile(r"phase  |read \d+ of ")


@dataclass(frozen=True, slots=True)
class Transcript:
    name: str
    """Of the record, and of the mark before its block in the README."""
    arguments: tuple[str, ...]
    typed: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return ["env", f"COLUMNS={WIDTH}", "twostroke", *self.arguments]

    @property
    def record(self) -> Path:
        return RESULTS / f"{self.name}.txt"

    @property
    def stdin(self) -> str:
        return "".join(f"{line}\n" for line in self.typed)


TRANSCRIPTS = (
    Transcript("run-smollm2", ("run", "smollm2", "Explain in two sentences why the sky is blue.")),
    Transcript(
        "chat-smollm2",
        ("chat", "smollm2", "--temperature", "0", "--max-tokens", "80"),
        ("Write one sentence about the sea.", "Now one about the mountains.", "And one about the desert."),
    ),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change from run to run on one kind of processor."""

    answers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    """Tokens: of each phase, or of each turn those read, in all, cached and written."""


def facts_of(text: str) -> Facts:
    """Of a block in the README; of what a command says on standard error, the counts."""
    answers: list[list[str]] = []
    is_answer = False
    for line in text.splitlines():
        if line.startswith(("smollm2: ", "> ")):
            answers.append([])
            is_answer = True
        elif line.startswith("/reset") or _BEHIND_ANSWER.match(line):
            is_answer = False
        elif is_answer:
            answers[-1].append(line)
    joined = (" ".join(" ".join(lines).split()) for lines in answers)
    counts = re.findall(
        r"^(?:prefill \(read\)|decode \(write\)) +(\d+)|^read (\d+) of (\d+) tokens \((\d+) cached\).* wrote (\d+) in",
        text,
        re.MULTILINE,
    )
    return Facts(
        tuple(answer for answer in joined if answer),
        tuple(tuple(int(count) for count in found if count) for found in counts),
    )


def recorded_output(record: str) -> str:
    """What the command printed, of a whole record."""
    return record.partition("on standard error):\n")[2].rpartition("\nexit code ")[0].strip("\n")


def block_of(transcript: Transcript, record: str) -> str:
    """A record as the README shows it: what was typed where it was typed, and long lines wrapped."""
    lines, typed = [f"$ twostroke {' '.join(map(_quoted, transcript.arguments))}"], list(transcript.typed)
    for line in recorded_output(record).splitlines():
        if typed and line.startswith("> "):
            lines.append(f"> {typed.pop(0)}")
            line = line.removeprefix("> ")
        if line.strip() != ">":
            lines += textwrap.wrap(line, WIDTH, break_on_hyphens=False) if len(line) > WIDTH else [line]
    return "\n".join(lines)


def readme_block(readme: str, name: str) -> str:
    found = _block(name).search(readme)
    if found is None:
        raise SystemExit(f"README.md has no block behind the mark of {name}")
    return found[2]


def _block(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: made by `make readme` -->\n```\n)(.*?)(\n```\n)", re.DOTALL)


def provenance(record: str) -> str:
    """When and where, in the README's words."""
    fields = dict(re.findall(r"^(date|machine) +(.*)$", record, re.MULTILINE))
    return f"Recorded on {fields['date'].partition(' ')[0]} on {fields['machine'].partition(',')[0]},"


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


def main() -> None:
    here = {**os.environ, "PYTHON": sys.executable}
    here["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{here['PATH']}"
    for transcript in TRANSCRIPTS:
        command = ["bench/record.sh", transcript.name, *transcript.command]
        pipe = {"input": transcript.stdin} if transcript.typed else {"stdin": subprocess.DEVNULL}
        subprocess.run(command, cwd=ROOT, env=here, text=True, check=True, **pipe)  # type: ignore[call-overload]
        record, readme = transcript.record.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")
        readme_block(readme, transcript.name)
        shown = block_of(transcript, record)
        readme = _block(transcript.name).sub(lambda found, shown=shown: found[1] + shown + found[3], readme)
        readme = re.sub(r"Recorded on \d{4}-\d\d-\d\d on [^,]+,", provenance(record), readme)
        README.write_text(readme, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "bench.picture"], cwd=ROOT, env=here, check=True)


if __name__ == "__main__":
    main()
