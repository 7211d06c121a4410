"""The comparisons on the README's first screen, and on the pages about performance, say what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
CPU_RECORD = "cpu-2026-11-15-1436.md"
ENGINES = {
    "Twostroke": "twostroke",
    "llama.cpp Q8_0": "llama-cpp-q8_0",
    "OpenVINO int8": "openvino-int8",
    "llama.cpp Q4_0": "llama-cpp-q4_0",
    "OpenVINO int4": "openvino-int4",
}
README_ROWS = {
    "512 in, 128 out: prefill, tok/s": "W1 prefill tok/s",
    "512 in, 128 out: decode, tok/s": "W1 decode tok/s",
    "4096 in, 32 out: prefill, tok/s": "W2 prefill tok/s",
    "4096 in, 32 out: decode, tok/s": "W2 decode tok/s",
    "16 at once: output, tok/s": "W3 output tok/s",
    "1024 cached + 32: TTFT, ms": "W4 hit TTFT ms",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """Each table of a page as rows by their first cell, each by the heads of its columns; bold is left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heads, _, *rows = ([cell.strip(" *") for cell in line[1:-1].split("|")] for line in block.splitlines())
        found.append({row[0]: dict(zip(heads[1:], row[1:], strict=False)) for row in rows})
    return found


def table_with(text: str, row: str) -> dict[str, dict[str, str]]:
    [table] = [table for table in tables(text) if row in table]
    return table


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)]


def recorded_on_cpu() -> dict[str, dict[str, float]]:
    """Medians of each engine: the first number of a cell, before its range."""
    table = tables(text_of(f"bench/results/{CPU_RECORD}").replace(" (a coarser model)", ""))[0]
    return {
        engine: {head: numbers(cell)[0] for head, cell in table[engine].items() if cell} for engine in ENGINES.values()
    }


def as_shown(value: float, cell: str) -> float:
    """A recorded value with as many digits as a cell shows."""
    decimals = len(cell.partition(".")[2])
    return float(f"{value + 1e-9:.{decimals}f}")


def test_the_readme_compares_cpus_as_recorded() -> None:
    readme, recorded = text_of("README.md"), recorded_on_cpu()
    table = table_with(readme, next(iter(README_ROWS)))
    assert CPU_RECORD in readme and set(README_ROWS) == set(table)
    for row, figure in README_ROWS.items():
        for head, cell in table[row].items():
            engine = ENGINES[head.rstrip(" *")]
            assert numbers(cell) == [as_shown(recorded[engine][figure], cell)], (row, head)


def test_the_page_of_the_cpu_has_the_recorded_medians() -> None:
    page, recorded = text_of("docs/performance.md"), recorded_on_cpu()
    table = next(table for table in tables(page) if "Twostroke" in table and "W2 prefill tok/s" in table["Twostroke"])
    for name, engine in ENGINES.items():
        row = next(cells for first, cells in table.items() if first.startswith(name))
        assert {head: numbers(cell)[0] for head, cell in row.items()} == recorded[engine]


def twostroke_figures(part: str, section: str) -> list[dict[tuple[str, str], float]]:
    """Of each section of a run whose title begins so: by workload and figure, in the unit shown."""
    found = []
    for text in re.split(r"^== ", part, flags=re.MULTILINE)[1:]:
        if text.startswith(section):
            figures, workload = {}, ""
            for line in text.splitlines():
                if match := re.match(r"(\w*) +(\w[\w ]*?)  +([\d.,]+) (µs|ms|s|tok/s|tokens) ", line):
                    workload = match[1] or workload
                    if match[4] != "tokens":
                        figures[workload, match[2]] = numbers(match[3])[0]
            found.append(figures)
    return found


def vllm_figures(section: str) -> dict[str, list[dict[str, float]]]:
    """Of the record's last part that is about a model: by workload, each time it was played."""
    parts = re.split(rf"^{re.escape(section)}.*$", text_of("bench/results/cuda-vllm.txt"), flags=re.MULTILINE)
    found: dict[str, list[dict[str, float]]] = {}
    for workload, text in re.findall(r"^RESULT (\w+) (\{.*\})$", parts[-1].split("----")[0], re.MULTILINE):
        found.setdefault(workload, []).append(json.loads(text))
    return found


def in_run(number: int, section: str) -> list[dict[tuple[str, str], float]]:
    return twostroke_figures(
        text_of("bench/results/cuda-bench.txt").split(f"---- run {number},")[1].split("\n---- ")[0], section
    )


def worst_and_best() -> dict[str, tuple[list[float], list[float]]]:
    """Rows of the README's table of the card: our slower run, vLLM's faster one."""
    small, large = in_run(29, "8B"), in_run(30, "30B")
    their_small, their_large = vllm_figures("Llama-3.1-8B"), vllm_figures("Qwen3-30B-A3B")
    single = max(large, key=lambda figures: figures["single", "TTFT"])
    return {
        "Llama-3.1-8B, 256 requests of mixed lengths: output, tok/s": (
            [min(figures["nano", "output"] for figures in small)],
            [max(one["out_tok_s"] for one in their_small["nano"])],
        ),
        "Llama-3.1-8B, 128 requests of 1024 in, 256 out: output, tok/s": (
            [small[0]["batch", "output"]],
            [their_small["batch"][0]["out_tok_s"]],
        ),
        "Llama-3.1-8B, start to ready with nothing cached, s": (
            [small[0]["start", "ready"]],
            [their_small["start"][0]["s"]],
        ),
        "Qwen3-30B-A3B, 256 requests of mixed lengths: output, tok/s": (
            [min(figures["nano", "output"] for figures in large)],
            [max(one["out_tok_s"] for one in their_large["nano"])],
        ),
        "Qwen3-30B-A3B, one stream, 512 in: TTFT and TPOT, ms": (
            [single["single", "TTFT"], single["single", "TPOT"]],
            [their_large["single"][0]["ttft_ms"], their_large["single"][0]["tpot_ms"]],
        ),
    }


@pytest.mark.parametrize("row", worst_and_best())
def test_the_readme_compares_cards_as_recorded(row: str) -> None:
    table = table_with(text_of("README.md"), row)
    assert set(table) == set(worst_and_best())
    for head, recorded in zip(("Twostroke", "vLLM 0.26"), worst_and_best()[row], strict=True):
        shown = re.findall(r"\d[\d,]*(?:\.\d+)?", table[row][head])
        assert numbers(" ".join(shown)) == [as_shown(value, cell) for value, cell in zip(recorded, shown, strict=True)]


def test_the_page_of_the_card_has_both_runs() -> None:
    table = table_with(text_of("docs/performance-gpu.md"), "Llama-3.1-8B nano: output tok/s")
    for name, figures, theirs in (
        ("Llama-3.1-8B", in_run(29, "8B"), vllm_figures("Llama-3.1-8B")),
        ("Qwen3-30B-A3B", in_run(30, "30B"), vllm_figures("Qwen3-30B-A3B")),
    ):
        row = table[f"{name} nano: output tok/s"]
        assert numbers(row["Twostroke"]) == [one["nano", "output"] for one in figures]
        assert numbers(row["vLLM 0.26"]) == [round(one["out_tok_s"]) for one in theirs["nano"]]
        ratio = sum(numbers(row["Twostroke"])) / len(figures) / (sum(numbers(row["vLLM 0.26"])) / len(theirs["nano"]))
        assert numbers(row["ratio of the means"]) == [pytest.approx(ratio, abs=0.006)]


SAME_WEIGHTS = {"Gemma-3-12B": "gemma-3-12b", "Qwen2.5-7B": "qwen2.5-7b"}
FIGURES = {"output, tok/s": "out_tok_s", "TTFT p50, ms": "ttft_p50_ms", "TTFT p99, ms": "ttft_p99_ms"} | {
    "ITL p99, ms": "itl_p99_ms"
}


def test_the_page_of_the_card_compares_over_the_same_weights_as_recorded() -> None:
    record = text_of("bench/results/cuda-same-weights.txt")
    table = table_with(text_of("docs/performance-gpu.md"), "Gemma-3-12B few: output, tok/s")
    assert len(table) == 28
    for row, cells in table.items():
        model, workload, label = re.match(r"(\S+) (\w+): (.+)", row).groups()  # type: ignore[union-attr]
        part = record.split(f"\n{SAME_WEIGHTS[model]}\n")[1].split("\n\n")[0]
        line = re.search(rf"^\| {workload} \| {FIGURES[label]} \| (.+) \|$", part, re.MULTILINE)
        assert line is not None, row
        recorded = numbers(line[1])
        for cell, value in zip(cells.values(), recorded, strict=True):
            assert numbers(cell) == [as_shown(value, cell.removesuffix(" x"))], row
    assert all(numbers(cells["ahead"])[0] > 1.0 for cells in table.values())
