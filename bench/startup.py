"""Process start to first token, with warm caches: fresh processes of `twostroke run`, timed from outside until the
answer's first byte, and beside them the parts, timed inside a process that does the same through the API.

    python bench/startup.py [--model smollm2] [--repeats 9] [--words 380]"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

SENTENCE = "The mill by the river had two wheels, and the older one turned only when the water was high. "

CLI = "from twostroke.cli import main; main()"

PARTS = """
import json, sys, time
spawned_s, model, prompt = float(sys.argv[1]), sys.argv[2], sys.argv[3]
marks = []
def mark(name): marks.append((name, time.monotonic(), time.process_time()))
mark("interpreter")
from twostroke.text.chat_template import start_process
process = start_process()
mark("start the template's process")
from twostroke import EngineConfig, LLM, SamplingParams
from twostroke.engine.build import assemble, load_checkpoint, load_tokenizer, resolve_model
import twostroke.backends.cpu.backend
mark("imports")
checkpoint = load_checkpoint(resolve_model(model), name=model)
mark("open the model")
tokenizer = load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)
mark("tokenizer")
llm = LLM.from_assembly(assemble(checkpoint, tokenizer, EngineConfig()))
llm._template_process = process
mark("backend: kernels, packed weights, KV, threads")
ids = llm.chat_token_ids([{"role": "user", "content": prompt}])
mark("template and encode")
for event in llm.stream(ids, SamplingParams(max_tokens=1, temperature=0.0)):
    if getattr(event, "token_ids", ()):
        break
mark("prefill and first token")
llm.close()
before = [("", spawned_s, 0.0), *marks]
parts = {name: (end - marks_end, cpu - marks_cpu) for (name, end, cpu), (_, marks_end, marks_cpu) in zip(marks, before)}
print(json.dumps({"tokens": len(ids), "parts": parts}))
"""


def environment() -> dict[str, str]:
    """An installed package has its bytecode; an environment that forbids writing it would time the compiler."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def first_byte_s(model: str, prompt: str) -> float:
    command = [sys.executable, "-c", CLI, "run", model, prompt, "--max-tokens", "1", "--no-phases"]
    started_s = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment()
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    taken_s = time.monotonic() - started_s
    process.stdout.read()
    if process.wait() or not first:
        raise SystemExit(f"`twostroke run {model}` failed")
    return taken_s


def parts_s(model: str, prompt: str) -> tuple[int, dict[str, list[float]]]:
    """The prompt's tokens, and (seconds, seconds of CPU) of each part."""
    command = [sys.executable, "-c", PARTS, str(time.monotonic()), model, prompt]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr)
    report = json.loads(finished.stdout.splitlines()[-1])
    return report["tokens"], report["parts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--words", type=int, default=450, help="of the prompt")
    options = parser.parse_args()
    words = SENTENCE.split()
    prompt = " ".join(words[index % len(words)] for index in range(options.words))
    first_byte_s(options.model, prompt)  # warms every cache: bytecode, kernels, packed weights, pages
    tokens, _ = parts_s(options.model, prompt)
    totals, parts = [], []
    for _ in range(options.repeats):  # alternating, so that a busy moment meets both
        totals.append(first_byte_s(options.model, prompt))
        parts.append(parts_s(options.model, prompt)[1])
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{options.model}, a prompt of {tokens} tokens, {options.repeats} fresh processes each; load average {load}")
    print(f"twostroke run, process start to first byte of the answer: {_spread(totals)}")
    print("the parts, through the API:")
    for name in parts[0]:
        cpu_s = statistics.median(part[name][1] for part in parts)
        print(f"  {name:<46} {_spread([part[name][0] for part in parts])}; {1e3 * cpu_s:.0f} ms of CPU")
    print(f"  {'together':<46} {_spread([sum(wall_s for wall_s, _ in part.values()) for part in parts])}")


def _spread(values_s: list[float]) -> str:
    low, middle, high = min(values_s), statistics.median(values_s), max(values_s)
    return f"median {1e3 * middle:5.0f} ms, {1e3 * low:.0f} to {1e3 * high:.0f}"


if __name__ == "__main__":
    main()
