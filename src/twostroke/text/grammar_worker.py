"""Compiles grammars in a process of its own, to see whether they can be: a stranger's schema may take any time and
memory. Reads messages from stdin (first the vocabulary, then specs) and answers each with one. The parent,
`grammar_check.py`, holds the clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twostroke.core.errors import BadRequestError
from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import GrammarCompiler, Vocabulary
from twostroke.text.side_process import Message, answer_requests


def answer(compiler: GrammarCompiler, message: Message) -> Message:
    try:
        compiler.try_out(GrammarSpec(**message.fields))
    except BadRequestError as error:
        return Message({"refused": str(error)})
    except MemoryError:
        return Message({"refused": "it needs too much memory"})
    except Exception as error:  # whatever a stranger's grammar can bring about in the library
        return Message({"refused": f"it cannot be followed: {str(error)[:300] or type(error).__name__}"})
    return Message({"sound": True})


def begin(first: Message) -> Callable[[Message], Message]:
    setup = first.fields
    tokens = [bytes.fromhex(token) for token in setup["tokens"]]
    return partial(answer, GrammarCompiler(Vocabulary(tokens, setup["special_ids"], setup["eos_ids"])))


if __name__ == "__main__":
    answer_requests(begin)
