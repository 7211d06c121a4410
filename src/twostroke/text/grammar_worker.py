"""Compiles grammars in a process of its own, to see whether they can be: a stranger's schema may take any time and
memory. Reads JSON lines from stdin (first the vocabulary, then specs) and answers each with one. The parent,
`grammar_check.py`, holds the clock."""

from __future__ import annotations

import json
import sys
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.side_process import limit_cpu_time, limit_memory


def answer(compiler: GrammarCompiler, spec: GrammarSpec) -> dict[str, Any]:
    try:
        compiler.check(spec)
    except BadRequestError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it needs too much memory"}
    except Exception as error:  # whatever a stranger's grammar can bring about in the library
        return {"refused": f"it cannot be followed: {str(error)[:300] or type(error).__name__}"}
    return {"sound": True}


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    line = requests.readline()
    if not line:
        return  # started for nothing
    setup = json.loads(line)
    limit_memory(setup["max_memory_bytes"])
    tokens = [bytes.fromhex(token) for token in setup["tokens"]]
    compiler = GrammarCompiler(Vocabulary(tokens, setup["special_ids"], setup["eos_ids"]))
    reply: dict[str, Any] = {"ready": True}
    while True:
        answers.write(json.dumps(reply).encode() + b"\n")
        answers.flush()
        line = requests.readline()
        if not line:
            return
        limit_cpu_time(setup["max_cpu_s"])
        reply = answer(compiler, GrammarSpec(**json.loads(line)))


if __name__ == "__main__":
    main()
