"""Tokens do not depend on tiers: on tiny random models, on the reference and the CPU backend, with full attention, with
windows, with latents, with int8 KV; greedy and seeded; and what a restart finds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.speculation.tiny import _SIZES, VOCAB_SIZE

from twostroke.backends.host.kept_blocks import HostKeptBlocks
from twostroke.backends.interface import BlockBackend
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.events import TokenEvent
from twostroke.core.kv_blocks import KVFormat
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.timing import SequenceTiming
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.tiers import Computed, kv_identity
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint, FileTensors
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

SHAPES = {
    "full": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "full and window": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "head_dim": 32,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "latents": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
CASES = [
    ("reference", "full", "auto"),
    ("reference", "full and window", "auto"),
    ("reference", "latents", "auto"),
    ("cpu", "latents", "auto"),
    ("cpu", "full", "auto"),
    ("cpu", "full", "int8"),
    ("cpu", "full and window", "int8"),
    ("cpu", "full and window", "auto"),
]
CONTEXT = 192
COMPUTED = Computed("float32", "rope as stored")


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models read faster than anything is loaded."""
    monkeypatch.setattr(Worth, "loads", lambda *_: True)
    monkeypatch.setattr(Worth, "may_spill", lambda *_: True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, WeightKind], Checkpoint]:
    made = {}
    for name, shape in SHAPES.items():
        for kind in (WeightKind.F32, WeightKind.Q8_0):
            folder = tmp_path_factory.mktemp("model")
            (folder / "config.json").write_text(json.dumps({**_SIZES, **shape}))
            made[name, kind] = random_checkpoint(folder, kind, seed=3)
    return made


@dataclass
class Played:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    timings: dict[str, SequenceTiming] = field(default_factory=dict)

    @property
    def from_host(self) -> int:
        return sum(timing.tier_tokens.host for timing in self.timings.values())

    @property
    def from_disk(self) -> int:
        return sum(timing.tier_tokens.disk for timing in self.timings.values())


def play(engine: Engine, requests: list[Request], together: int = 3, seed: int = 1) -> Played:
    """Some at a time; each arrives while others run."""
    played, generator, left = Played(), random.Random(seed), list(requests)
    running = 0
    while left or engine.busy:
        while left and running < together and generator.random() < 0.6:
            engine.add(left.pop(0))
            running += 1
        for event in engine.step():
            if isinstance(event, TokenEvent):
                name = f"{event.request_id}.{event.sample_index}"
                played.tokens.setdefault(name, []).extend(event.token_ids)
                assert event.error is None
                if event.timing is not None:
                    played.timings[name] = event.timing
                    running -= event.sample_index == 0
        engine.scheduler.check()
        catch_up(engine)
    return played


def catch_up(engine: Engine) -> None:
    """Until the disk's thread is not far behind: what it has no time for stays in host memory alone."""
    tiers = engine.scheduler.ledger.tiers
    while tiers is not None and len(tiers._writing) > sum(tiers.host.num_slots) // 8:
        tiers.wait(0.05)
        tiers.settle()


def conversations(num: int = 5, turns: int = 4, salt: str = "") -> list[Request]:
    """Turn by turn, one conversation after the other: each comes back when the device has forgotten it."""
    generator, requests = random.Random(7), []
    histories = [[generator.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(num)]
    for turn in range(turns):
        for number, history in enumerate(histories):
            history += [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(5, 25))]
            drawn = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
            sampling = SamplingParams(max_tokens=8, ignore_eos=True, n=2 if number == 3 else 1, **drawn)
            requests.append(Request(f"{number}.{turn}", tuple(history), sampling, cache_salt=salt, seed=number))
    return requests


def make_engine(checkpoint: Checkpoint, backend: str, kind: str, num_blocks: int, kv: KVConfig) -> Engine:
    """With a pool of so many blocks of each group."""
    kv = replace(kv, kind=kind, block_size=16)
    config = EngineConfig(backend=backend, threads=1, max_context=CONTEXT, policy="fifo", kv=kv)
    big = replace(config, kv=KVConfig(memory_bytes=20_000_000, kind=kind, block_size=16))
    resolved = assemble(checkpoint, None, big)
    layout = resolved.resolved.layout
    resolved.engine.close()
    a_block = resolved.resolved.kv_bytes // sum(group.num_blocks for group in layout.groups)
    memory = a_block * num_blocks * len(layout.groups)
    return assemble(checkpoint, None, replace(config, kv=replace(config.kv, memory_bytes=memory))).engine


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(case))
def case(
    request: pytest.FixtureRequest, checkpoints: dict[tuple[str, WeightKind], Checkpoint]
) -> Iterator[tuple[Checkpoint, str, str, Played]]:
    """A model, and what it answers without tiers on a large pool."""
    backend, shape, kind = request.param
    checkpoint = checkpoints[shape, WeightKind.Q8_0 if backend == "cpu" else WeightKind.F32]
    engine = make_engine(checkpoint, backend, kind, 200, KVConfig())
    yield checkpoint, backend, kind, play(engine, conversations())
    engine.close()


def test_tokens_are_the_same_from_host_memory_and_from_disk_after_a_restart(
    case: tuple[Checkpoint, str, str, Played], tmp_path: Path
) -> None:
    checkpoint, backend, kind, alone = case
    kv = KVConfig(host_gb=0.02, disk=str(tmp_path / "kv"), disk_gb=0.1)
    engine = make_engine(checkpoint, backend, kind, 16, kv)
    played = play(engine, conversations())
    assert played.tokens == alone.tokens
    assert played.from_host > 500
    engine.close()
    engine = make_engine(checkpoint, backend, kind, 16, kv)
    again = play(engine, conversations())
    assert again.tokens == alone.tokens
    assert again.from_disk > 300
    salted = play(engine, conversations(salt="another"))
    assert salted.tokens == alone.tokens
    first_turns = [timing for name, timing in salted.timings.items() if name.endswith(".0.0")]
    assert first_turns and all(not any(timing.tier_tokens) for timing in first_turns)
    engine.clear_prefixes()
    assert not list((tmp_path / "kv").glob("*.kvsegment"))
    engine.close()


def test_memory_of_host_slots_is_had_ahead_so_that_no_spill_waits_for_it(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint],
) -> None:
    """A first touch is many times dearer than a copy, and spills are made where steps are launched."""
    engine = make_engine(checkpoints["full", WeightKind.F32], "reference", "auto", 16, KVConfig(host_gb=0.02))
    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and isinstance(tiers.blocks, HostKeptBlocks)
    ahead = tiers.blocks._ahead
    assert ahead is not None and ahead.wait(60.0)
    engine.close()


def test_an_engine_that_ends_leaves_what_only_the_device_had(
    case: tuple[Checkpoint, str, str, Played], tmp_path: Path
) -> None:
    checkpoint, backend, kind, alone = case
    kv = KVConfig(host_gb=0.02, disk=str(tmp_path / "kv"), disk_gb=0.1)
    request = conversations()[-1]
    for number, is_there in enumerate((False, True)):
        engine = make_engine(checkpoint, backend, kind, 60, kv)
        played = play(engine, [replace(request, request_id=f"r{number}")])
        assert played.tokens[f"r{number}.0"] == alone.tokens[f"{request.request_id}.0"]
        assert bool(played.from_disk) == is_there
        engine.close()


def test_blocks_are_read_out_and_written_in(case: tuple[Checkpoint, str, str, Played]) -> None:
    """What one engine read, another goes on from: its own blocks are spoiled, and the bytes are all that it has."""
    checkpoint, backend, kind, alone = case
    earlier, later = (one for one in conversations() if one.request_id in ("0.2", "0.3"))
    engines = [make_engine(checkpoint, backend, kind, 60, KVConfig()) for _ in range(3)]
    for engine in engines:  # the same on each: block ids are the same
        play(engine, [earlier])
    source = engines[0].backend
    assert isinstance(source, BlockBackend)
    for group, form in enumerate(source.block_format.groups):
        blocks, nothing = list(range(12)), memoryview(bytearray(form.num_bytes * 12))
        buffer = memoryview(bytearray(nothing.nbytes))
        source.read_blocks(group, blocks, buffer)
        for engine, data in zip(engines[1:], (buffer, nothing), strict=True):
            target = engine.backend
            assert isinstance(target, BlockBackend) and target.block_format == source.block_format
            assert target.block_format.digest() == source.block_format.digest()
            target.write_blocks(group, blocks, nothing)
            target.write_blocks(group, blocks, data)
        with pytest.raises(BackendError, match="bytes each"):
            source.write_blocks(group, blocks[1:], buffer)
        with pytest.raises(BackendError, match="blocks 0 to"):
            source.read_blocks(group, [10**6], memoryview(bytearray(form.num_bytes)))
    told = [play(engine, [later]) for engine in engines]
    assert all(played.timings["0.3.0"].cached_tokens >= 64 for played in told)
    assert told[0].tokens == told[1].tokens == {"0.3.0": alone.tokens["0.3.0"]}
    assert told[2].tokens != told[0].tokens, "without the bytes it says something else"
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        (KVConfig(disk_gb=1.0), "says which folder"),
        (KVConfig(host_gb=1.0, prefix_caching=False), "prefix caching is off"),
        (KVConfig(host_gb=1e-9), "less than two blocks"),
        (KVConfig(host_gb=1e6), "of memory"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], kv: KVConfig, says: str
) -> None:
    config = EngineConfig(backend="reference", threads=1, max_context=CONTEXT, kv=replace(kv, memory_bytes=10**7))
    with pytest.raises(BadRequestError, match=says):
        assemble(checkpoints["full", WeightKind.F32], None, config)


def test_a_folder_that_cannot_be_used_is_refused(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    kv = KVConfig(memory_bytes=10**7, disk=str(tmp_path / "file"))
    with pytest.raises(BackendError, match="cannot be used"):
        assemble(checkpoints["full", WeightKind.F32], None, EngineConfig(backend="reference", max_context=64, kv=kv))


def test_kv_of_weights_that_were_written_anew_is_another_models(
    case: tuple[Checkpoint, str, str, Played], tmp_path: Path
) -> None:
    """The same size and the same ends of every tensor: the file's time tells."""
    checkpoint, file, form = case[0], tmp_path / "model.safetensors", KVFormat("cpu", "as read", 16, ())
    file.write_bytes(b"weights")
    read = replace(checkpoint, tensors=FileTensors(checkpoint.tensors, (file,)))
    before = kv_identity(read, form, COMPUTED)
    assert kv_identity(read, form, COMPUTED) == before
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))
    assert kv_identity(read, form, COMPUTED) != before


ANOTHER = """
import sys
from pathlib import Path
from tests.engine.test_tiers import *
Worth.loads = Worth.may_spill = lambda *_: True
checkpoint = random_checkpoint(Path(sys.argv[1]), WeightKind.Q8_0, seed=3)
engine = make_engine(checkpoint, "cpu", "auto", 16, KVConfig(host_gb=0.02, disk=sys.argv[2], disk_gb=0.1))
play(engine, conversations())
assert engine.scheduler.ledger.tiers._threads.flush(60.0)
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_an_engine_finds_what_another_one_has_written_since_it_started(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], tmp_path: Path
) -> None:
    """Two processes, both still running; neither has been told of the other."""
    checkpoint = checkpoints["full", WeightKind.Q8_0]
    plain = make_engine(checkpoint, "cpu", "auto", 200, KVConfig())
    alone = play(plain, conversations())
    plain.close()
    engine = make_engine(checkpoint, "cpu", "auto", 16, KVConfig(host_gb=0.02, disk=str(tmp_path / "kv"), disk_gb=0.1))
    command = [sys.executable, "-c", ANOTHER, str(checkpoint.path), str(tmp_path / "kv")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "written\n"
        played = play(engine, conversations())
        assert other.poll() is None
        other.kill()
    assert played.tokens == alone.tokens
    assert played.from_disk > 300
    engine.close()
