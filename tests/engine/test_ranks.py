"""Engines whose model several processes hold together: their answers are one process's, whatever is asked for; what
they take; how they end; and what they refuse."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny, variants

from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BackendLostError, BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.grammar import GrammarSpec
from twostroke.core.request import Request
from twostroke.engine.build import Assembly, assemble, build, prepare_model
from twostroke.engine.fleet import FleetSettings
from twostroke.models.loading import load_checkpoint

MB = 10**6
CONFIG = EngineConfig(max_context=128, threads=2, kv=KVConfig(memory_bytes=8 * MB), policy="fifo")
LIMIT_S = 60.0
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def children(pid: int | None = None) -> list[int]:
    """The processes of ranks that a process has started (Linux)."""
    tasks = Path(f"/proc/{pid or os.getpid()}/task").iterdir()
    started = [child for task in tasks for child in _words(task / "children").decode().split()]
    return sorted(int(one) for one in started if b"rank_process" in _words(Path(f"/proc/{one}/cmdline")))


def _words(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # whose it is has just ended
        return b""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: list[int]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while any(map(is_running, pids)):
        assert time.monotonic() < end_s, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def answers(assembly: Assembly) -> list[list[int]]:
    """Several requests side by side: greedy and seeded, two samples, logprobs of the prompt, a shared beginning."""
    engine, tokens = assembly.engine, {}
    prompts = [tuple(range(20 + index, 60)) for index in range(3)] + [tuple(range(20, 75))]
    ways = [
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
    ]
    for index, (prompt, sampling) in enumerate(zip(prompts, ways, strict=True)):
        engine.add(Request(str(index), prompt, sampling))
    while engine.busy:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                assert event.error is None, event.error
                tokens.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
    return [tokens[key] for key in sorted(tokens)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("gpt_oss", tmp_path_factory.mktemp("ranks"))[0]


def built(folder: Path, **changes: object) -> Assembly:
    return build(str(folder), replace(CONFIG, **changes), text=False)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[int]]]:
    """By backend, the answers of one process."""
    found = {}
    for backend in ("reference", "cpu"):
        assembly = built(folder, backend=backend, quantise="none")
        found[backend] = answers(assembly)
        assembly.engine.close()
    return found


@on_linux
@pytest.mark.parametrize(("backend", "size"), [("reference", 2), ("cpu", 2), ("reference", 4)])
def test_processes_answer_as_one_does_and_end_with_their_engine(
    backend: str, size: int, folder: Path, alone: dict[str, list[list[int]]]
) -> None:
    before = children()
    assembly = built(folder, backend=backend, tensor_parallel=size, quantise="none")
    own = sorted(set(children()) - set(before))
    try:
        assert len(own) == size - 1
        assert any(f"{size} ranks share the model, a process each: heads " in note for note in assembly.notes)
        assert answers(assembly) == alone[backend]
    finally:
        assembly.engine.close()
    assert not any(map(is_running, own)), "they had ended when it was closed"


@pytest.mark.parametrize(("variant", "backend"), [("nemotron_h", "reference"), ("granite_hybrid", "cpu")])
def test_processes_that_keep_a_part_of_each_state(variant: str, backend: str, tmp_path: Path) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    found = []
    for size in (1, 2):
        assembly = built(folder, backend=backend, tensor_parallel=size, quantise="none", speculate="auto")
        found.append(answers(assembly))
        found.append(answers(assembly))  # from states that were kept
        assert assembly.engine.scheduler.counts().prefix_hit_tokens > 0
        assembly.engine.close()
    assert found[0] == found[1] == found[2] == found[3]


@on_linux
def test_a_rank_that_is_killed_ends_the_engine_with_a_sentence(folder: Path) -> None:
    before = children()
    assembly = built(folder, backend="reference", tensor_parallel=3)
    engine, own = assembly.engine, sorted(set(children()) - set(before))
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine.add(Request("one", (5, 6, 7), sampling))
    for _ in range(4):
        engine.step()
    os.kill(own[1], signal.SIGKILL)
    errors = []
    while engine.busy:
        errors += [event.error for event in engine.step() if isinstance(event, TokenEvent) and event.error]
    assert len(errors) == 1
    assert f"(process {own[1]}) was killed (SIGKILL): the ranks of one model go on together or not at all" in errors[0]
    assert errors[0].startswith("the reference backend failed: rank 2 of 3 ")
    assert isinstance(engine.lost, BackendLostError)
    wait_until_ended(own)
    engine.add(Request("two", (5, 6, 7), sampling))
    (event,) = [event for event in engine.step() if isinstance(event, TokenEvent)]
    assert event.error == errors[0], "and says the same to whoever comes later"
    engine.close()


@on_linux
def test_ranks_end_with_an_engine_that_is_killed(folder: Path) -> None:
    script = (
        "import sys; from twostroke.config import *; from twostroke.engine.build import build\n"
        "config = EngineConfig(backend='reference', tensor_parallel=3, max_context=64)\n"
        f"kept = build({str(folder)!r}, config, text=False); print('ready', flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        own = children(process.pid)
        assert len(own) == 2
    finally:
        process.kill()
        process.communicate()
    wait_until_ended(own)


@on_linux
def test_ranks_end_with_an_engine_that_is_forgotten(folder: Path) -> None:
    before = children()
    assembly = built(folder, backend="reference", tensor_parallel=2)
    own = sorted(set(children()) - set(before))
    assert len(own) == 1
    del assembly
    gc.collect()
    wait_until_ended(own)


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder, _ = make_tiny("llama", tmp_path)
    checkpoint = load_checkpoint(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()  # this process has it mapped; others find nothing
    with pytest.raises(BackendError, match=r"rank 1 of 2 \(process \d+\) failed \(.*safetensors.*\) as it started"):
        assemble(checkpoint, None, replace(CONFIG, backend="reference", tensor_parallel=2))


def test_a_grammar_and_drafts_are_rank_0s_affair(smollm2_path: Path) -> None:
    """The real model on the CPU, three KV heads between two ranks: structured output, stop strings, text that is looked
    up, each as one process does it."""
    grammar = GrammarSpec("regex", r"[A-Z][a-z]+, (19|20)[0-9]{2}")
    repeated = "one two three four five. " * 6 + "Again: one two"
    asked = [
        ("The city and the year:", SamplingParams(temperature=0.0, max_tokens=12, grammar=grammar)),
        (repeated, SamplingParams(temperature=0.0, max_tokens=12)),
        ("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8, stop=(".",))),
    ]
    found = []
    for size in (1, 2):
        config = replace(CONFIG, backend="cpu", max_context=256, kv=KVConfig(memory_bytes=60 * MB))
        with LLM(smollm2_path, replace(config, tensor_parallel=size)) as llm:
            found.append([llm.generate(prompt, sampling)[0].text for prompt, sampling in asked])
    assert found[0] == found[1]


def test_memory_is_what_all_ranks_take(tmp_path: Path) -> None:
    """One KV head that two ranks share is held twice; heads that are dealt out are held once."""
    shared = make_tiny("llama_bias", tmp_path / "one")[0]
    dealt = make_tiny("llama", tmp_path / "two")[0]
    for folder, factor in ((shared, 2), (dealt, 1)):
        one, two = (
            prepare_model(str(folder), replace(CONFIG, backend="reference", tensor_parallel=size)) for size in (1, 2)
        )
        needs = [
            prepared.factory.kv_bytes_per_token(prepared.checkpoint, (0, 1, 2), prepared.formats)
            for prepared in (one, two)
        ]
        assert needs[1] == factor * needs[0]
        assert two.shape.weight_bytes_per_step >= one.shape.weight_bytes_per_step
        assert one.calibration_path != two.calibration_path, "what one rank takes is no measure of two"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv": KVConfig(host_gb=1.0)}, "--kv-host-gb does not go with --tensor-parallel"),
        ({"kv": KVConfig(disk="/tmp/none")}, "--kv-disk does not go with --tensor-parallel"),
        ({"speculate": "draft:somewhere"}, "--speculate draft:somewhere does not go with --tensor-parallel"),
        ({"speculate": "eagle3:somewhere"}, "--speculate eagle3:somewhere does not go with --tensor-parallel"),
        (
            {"tensor_parallel": 5},
            "parallel 5: 4 heads cannot be shared by 5 ranks: a KV head has 2 queries for 3 ranks",
        ),
        ({"backend": "cuda"}, "not cuda: "),
        ({"rank_transport": "gloo"}, "its ranks meet in shared memory, and --rank-transport is for ranks on cards"),
        ({"rank_transport": "gloo", "tensor_parallel": 1}, "--rank-transport is for several ranks: it goes with"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_before_anything_is_loaded(
    changes: dict[str, object], sentence: str, folder: Path
) -> None:
    with pytest.raises((BadRequestError, BackendError)) as refused:
        built(folder, **{"backend": "reference", "tensor_parallel": 2, **changes})
    assert sentence in str(refused.value)


def test_an_engine_of_a_fleet_is_one_process(folder: Path) -> None:
    config = replace(CONFIG, backend="reference", tensor_parallel=2)
    with pytest.raises(BadRequestError, match="--role does not go with --tensor-parallel"):
        build(str(folder), config, text=False, fleet=FleetSettings("00" * 32))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", variants())
def test_every_family_in_processes(variant: str, size: int, tmp_path: Path) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    found = []
    for ranks in (1, size):
        assembly = built(folder, backend="reference", tensor_parallel=ranks)
        found.append(answers(assembly))
        assembly.engine.close()
    assert found[0] == found[1]
    assert all(token < VOCAB_SIZE for tokens in found[0] for token in tokens)
