"""The record's file: whole lines, read as far as they are whole, never written over, and bounded."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import get_args

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.server import recorder as recording
from twostroke.server import watch_events as w
from twostroke.server.recorder import FileRecorder
from twostroke.web.recording import read_recording
from twostroke.web.shapes import SHAPES


def record(path: Path, events: list[bytes]) -> None:
    async def run() -> None:
        recorder = FileRecorder(str(path))
        for event in events:
            recorder.keep(event)
        recorder.close()

    asyncio.run(run())


HELLO = b'{"t":"hello","model":"small"}'


def some_events(number: int) -> list[bytes]:
    return [HELLO] + [b'{"t":"control","paused":false,"number":%d}' % index for index in range(number)]


def test_a_record_cut_at_any_byte_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    events = some_events(40)
    record(tmp_path / "run", events)
    whole = (tmp_path / "run").read_bytes()
    assert whole == b"".join(event + b"\n" for event in events)
    draw = random.Random(7)
    for cut in [
        len(HELLO),
        len(HELLO) + 1,
        len(whole) - 1,
        *(draw.randrange(len(HELLO), len(whole)) for _ in range(200)),
    ]:
        (tmp_path / "cut").write_bytes(whole[:cut])
        found = read_recording(tmp_path / "cut").events
        complete = [json.loads(line) for line in whole[: cut + 1].split(b"\n")[:-1]]
        assert found == complete


def test_what_is_no_record_is_refused_with_a_sentence_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"", b"hello", b'{"t":"step"}\n', b'["hello"]\n', b"\xff\xfe\n", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(BadRequestError, match="is no record"):
            read_recording(path)
    path.write_bytes(HELLO + b'\n{"t":"control"}\nrubbish\n{"t":"else"}\n{"t":"kv","at_s":"x"}\n{"t":"control"}\n')
    assert [one["t"] for one in read_recording(path).events] == ["hello", "control", "control"]
    assert read_recording(path).num_torn == 3
    with pytest.raises(BadRequestError, match="cannot read"):
        read_recording(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":[]}',
        b'{"t":"step","chunks":[1]}',
        b'{"t":"step","chunks":null}',
        b'{"t":"step","slots":[[0,1,2]]}',
        b'{"t":"step","slots":[[0,1,2,"3"]]}',
        b'{"t":"step","done_s":NaN}',
        b'{"t":"step","done_s":1e999}',
        b'{"t":"control","unknown":-Infinity}',
        b'{"t":"kv","at_s":1,"groups":[{"runs":[5]}]}',
        b'{"t":"ended","ttft_s":"soon"}',
        b'{"t":"ended","spans":{}}',
        b'{"t":"hello","recorded":"x"}',
        b'{"t":"hello","model":["small"]}',
    ],
)
def test_a_line_of_another_shape_is_passed_over_wherever_it_stands(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run"
    path.write_bytes(HELLO + b"\n" + line + b"\n" + b'{"t":"control"}\n')
    recording = read_recording(path)
    assert [one["t"] for one in recording.events] == ["hello", "control"] and recording.num_torn == 1
    json.dumps(recording.events, allow_nan=False)
    path.write_bytes(line)
    with pytest.raises(BadRequestError, match="is no record"):
        read_recording(path)


def test_the_shapes_of_a_record_are_those_of_the_events() -> None:
    for kind in get_args(w.PageEvent):
        config = kind.__struct_config__
        names = set(kind.__struct_encode_fields__)
        assert set(SHAPES[config.tag]) == names, config.tag
    assert len(SHAPES) == len(get_args(w.PageEvent))


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(BadRequestError, match="is there already"):
        FileRecorder(str(tmp_path / "mine"))
    with pytest.raises(BadRequestError, match="cannot record"):
        FileRecorder(str(tmp_path / "no" / "folder"))
    assert (tmp_path / "mine").read_text() == "mine"


def test_too_many_events_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_WAITING_BYTES", 5000)
    monkeypatch.setattr(recording, "BYTES_PER_S", 0)
    record(tmp_path / "run", some_events(1000))
    assert (tmp_path / "run").stat().st_size <= 5000


def test_a_full_disk_ends_the_record_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "_write_all", full)
    record(tmp_path / "run", some_events(3))
    assert "No space left" in capsys.readouterr().err
