"""Compiles grammars in a process of its own, to see whether they can be: a stranger's schema may take any time and
memory. Reads messages from stdin (first the vocabulary, then specs) and answers each with one. The parent,
`grammar_check.py`, holds the clock."""

from __future__ import annotations

import sys
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.side_process import Message, limit_cpu_time, limit_memory, read_message, write_message


def answer(compiler: GrammarCompiler, spec: GrammarSpec) -> dict[str, Any]:
    try:
        compiler.try_out(spec)
    except BadRequestError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it needs too much memory"}
    except Exception as error:  # whatever a stranger's grammar can bring about in the library
        return {"refused": f"it cannot be followed: {str(error)[:300] or type(error).__name__}"}
    return {"sound": True}


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_message(requests)
    if first is None:
        return  # started for nothing
    setup = first.fields
    limit_memory(setup["max_memory_bytes"])
    tokens = [bytes.fromhex(token) for token in setup["tokens"]]
    compiler = GrammarCompiler(Vocabulary(tokens, setup["special_ids"], setup["eos_ids"]))
    reply: dict[str, Any] = {"ready": True}
    while True:
        write_message(answers, Message(reply))
        message = read_message(requests)
        if message is None:
            return
        limit_cpu_time(setup["max_cpu_s"])
        reply = answer(compiler, GrammarSpec(**message.fields))


if __name__ == "__main__":
    main()
