"""Prompts from files of either kind, and those that the package brings itself."""

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.training.prompts import own_prompts, read_prompts


def test_a_text_holds_one_prompt_a_paragraph(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Why is the sky blue?\n\n\nTwo lines\nof one prompt.\r\n\r\nA third\n")
    assert [one[0]["content"] for one in read_prompts(path)] == [
        "Why is the sky blue?",
        "Two lines\nof one prompt.",
        "A third",
    ]


def test_json_lines_are_texts_prompts_or_messages(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"plain"\n\n{"prompt": "named"}\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "id": 3}\n'
    )
    found = read_prompts(path)
    assert [one[-1]["content"] for one in found] == ["plain", "named", "Hi"]
    assert found[2][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'"one"\n{"prompt": 3}\n', "line 2 must be a text"),
        ("a.jsonl", b'"one"\n{"messages": [{"role": "user"}]}\n', "line 2 must be a text"),
        ("a.jsonl", b'"one"\n{nonsense\n', "line 2 is not valid JSON"),
        ("a.txt", b"only one", "holds 1 prompts, and 2 are needed"),
        ("a.txt", b"\xff\xfe\n\nb", "are not UTF-8 text"),
        ("a.txt", b"", "holds 0 prompts"),
    ],
)
def test_what_holds_no_prompts_is_refused(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRequestError, match=complaint):
        read_prompts(tmp_path / name)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(BadRequestError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


def test_the_package_brings_prompts_of_its_own():
    found = own_prompts()
    assert len(found) > 200
    assert len({one[0]["content"] for one in found}) == len(found)
