"""An answer's parts as items: each is opened once and closed once, in the order in which the model wrote."""

from __future__ import annotations

from twostroke.server.parsing import AnswerParser
from twostroke.server.response_items import OutputItems
from twostroke.text.reasoning import ThinkSplitter
from twostroke.text.tool_parsers.known_formats import HERMES

CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
ANSWER = "<think>Hm.</think>One. " + CALL.format("a", '{"x": [1, 2]}') + " Two." + CALL.format("b", "{}") + "Three."
ITEMS = [("reasoning", "Hm."), ("message", "One."), ("function_call", '{"x": [1, 2]}'), ("message", "Two.")]
ITEMS += [("function_call", "{}"), ("message", "Three.")]


def written(pieces: list[str], *, is_cut: bool = False) -> tuple[OutputItems, list[tuple[str, int]]]:
    items, parser = OutputItems(HERMES), AnswerParser(ThinkSplitter(), HERMES.parser())
    changes = []
    for index, piece in enumerate(pieces):
        changes += items.push(parser.push(piece, 1, is_last=index == len(pieces) - 1, is_cut=is_cut))
    changes += items.finish(is_cut=is_cut)
    shown: list[tuple[str, int]] = []
    for change in changes:
        if (change.kind, change.item.index) not in shown[-1:]:
            shown.append((change.kind, change.item.index))
    return items, shown


def test_items_come_one_after_the_other() -> None:
    items, shown = written(list(ANSWER))
    assert [(item.kind, item.text) for item in items.items] == ITEMS
    assert all(item.status == "completed" for item in items.items)
    assert shown == [(kind, index) for index in range(len(ITEMS)) for kind in ("opened", "added", "closed")]


def test_what_comes_at_once_keeps_a_call_whole() -> None:
    """A piece that ends one call, says something and begins the next, as several tokens in one output do."""
    middle = ANSWER.index(" Two.")
    for start in range(middle - 22, middle):
        for end in range(middle + 6, len(ANSWER)):
            items, shown = written([ANSWER[:start], ANSWER[start:end], ANSWER[end:]])
            assert [(item.kind, item.text) for item in items.items if item.kind == "function_call"] == [
                ITEMS[2],
                ITEMS[4],
            ]
            assert [shown.count(("closed", index)) for index in range(len(items.items))] == [1] * len(items.items)


def test_calls_without_arguments_and_answers_without_anything() -> None:
    items, _ = written(['<tool_call>{"name": "a"}</tool_call>'])
    assert [(item.kind, item.name, item.text) for item in items.items] == [("function_call", "a", "{}")]
    items, shown = written([""])
    assert [item.reply()["content"][0]["text"] for item in items.items] == [""] and shown == [
        ("opened", 0),
        ("closed", 0),
    ]


def test_a_call_that_was_cut_is_closed_and_is_no_item() -> None:
    call = CALL.format("a", '{"x": [1, 2]}')
    arguments_begin, arguments_end = call.index('{"x"') + 1, call.index("]}") + 2
    for cut in range(len(call) + 1):
        for pieces in (["Well. " + call[:cut]], list("Well. " + call[:cut])):
            items, shown = written(pieces, is_cut=True)
            kinds = [(item.kind, item.status, item.text.strip()) for item in items.items]
            if cut < arguments_end:
                assert kinds == [("message", "completed" if cut >= arguments_begin else "incomplete", "Well.")]
            else:
                assert kinds == [("message", "completed", "Well."), ("function_call", "completed", '{"x": [1, 2]}')]
            opened = [index for kind, index in shown if kind == "opened"]
            assert opened == [index for kind, index in shown if kind == "closed"]
            assert len(opened) == 1 + (cut >= arguments_begin)


def test_a_text_that_was_cut_is_incomplete() -> None:
    items, _ = written(["Well, we"], is_cut=True)
    assert [(item.kind, item.status, item.text) for item in items.items] == [("message", "incomplete", "Well, we")]
    assert written([""], is_cut=True)[0].items == []
