"""Models that draft, before any step: what they take of the memory, what is told of it, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.tiny_checkpoints import make_tiny
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BadRequestError, ModelError
from twostroke.engine.build import build, prepare_model
from twostroke.engine.companions import beside, plan_companion, refuse_other_tokens
from twostroke.machine import MemorySpace, detect
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.speculation.methods import Method, computing_methods, methods_of
from twostroke.text.loading import load_tokenizer
from twostroke.text.token_bytes import Spelling
from twostroke.text.tokenizer import Tokenizer

CONFIG = EngineConfig(backend="reference", threads=1, max_context=128, kv=KVConfig(memory_bytes=2 << 20))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_tiny(name, tmp_path_factory.mktemp(name))[0] for name in ("llama", "mistral")}
    return made | {"odd": make_tiny("mistral", tmp_path_factory.mktemp("odd"), head_dim=8)[0]}


def checkpoint_of(folder: Path, **changes: int) -> Checkpoint:
    checkpoint = load_checkpoint(folder)
    return replace(checkpoint, spec=replace(checkpoint.spec, **changes))


def test_its_kv_is_in_groups_of_its_own_that_keep_every_token(folders: dict[str, Path]) -> None:
    """Windows of the drafter free no blocks: it may lag behind what the model has long left."""
    prepared = prepare_model(str(folders["llama"]), replace(CONFIG, speculate=f"ngram,draft:{folders['mistral']}"))
    layout, resolved = prepared.resolved.layout, prepared.resolved
    own, other = layout.of_model(0).groups, layout.of_model(1).groups
    assert layout.groups == own + other and layout.places_of(1) == (1,)
    assert [(group.layers, group.window) for group in other] == [((0, 1, 2), None)]
    assert own[0].num_blocks == other[0].num_blocks
    alone = prepare_model(str(folders["llama"]), CONFIG)
    assert alone.companions == () and len(alone.resolved.layout.groups) == 1
    assert resolved.kv_bytes <= 2 << 20 and alone.resolved.kv_bytes <= 2 << 20
    assert resolved.kv_tokens < alone.resolved.kv_tokens
    (companion,) = prepared.companions
    assert (companion.method, companion.number, companion.taps) == ("draft", 1, ())
    assert companion.checkpoint.spec.family == "mistral"


def test_a_line_says_what_it_takes(folders: dict[str, Path]) -> None:
    source = str(folders["mistral"])
    prepared = prepare_model(str(folders["llama"]), replace(CONFIG, speculate=f"draft:{source}"))
    (line,) = [reason for reason in prepared.reasons if reason.startswith("draft model")]
    assert (
        line.startswith(f"draft model {source}: ")
        and " of weights and " in line
        and "MB of the KV; weights F32" in line
    )


def test_its_weights_leave_less_for_kv(folders: dict[str, Path]) -> None:
    here, checkpoint = detect(), load_checkpoint(folders["mistral"])
    from twostroke import backends

    factory, _ = backends.choose("reference", checkpoint)
    plan = plan_companion("draft", checkpoint, 1, CONFIG, factory, here)
    assert plan.weight_bytes == checkpoint.held_bytes()
    space = MemorySpace("this machine", 10**9, 10**8, 0.5)
    assert beside(space, (plan, plan)).free_beside_weights_bytes == 10**8 - 2 * plan.weight_bytes
    assert beside(replace(space, free_beside_weights_bytes=1), (plan,)).free_beside_weights_bytes == 0


def test_a_context_that_fits_without_it_is_refused_with_what_would_fit(folders: dict[str, Path]) -> None:
    little = replace(CONFIG, max_context=128, kv=KVConfig(memory_bytes=128 * 3 * 2 * 2 * 16 * 4))
    prepare_model(str(folders["llama"]), little)
    with pytest.raises(BadRequestError, match=r"a context of 128 needs .* would fit"):
        prepare_model(str(folders["llama"]), replace(little, speculate=f"draft:{folders['llama']}"))


def test_backends_that_cannot_run_it_say_so(folders: dict[str, Path]) -> None:
    asked = replace(CONFIG, backend="cpu", speculate=f"draft:{folders['odd']}")
    with pytest.raises(
        BackendError, match=r"odd.* cannot run on the cpu backend: its attention needs a head size that"
    ):
        prepare_model(str(folders["llama"]), asked)

    class OneModel:
        name = "single"

    with pytest.raises(BackendError, match="the single backend runs no second model yet"):
        plan_companion("draft", load_checkpoint(folders["llama"]), 1, CONFIG, OneModel(), detect())  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["lfm2", "granite_hybrid", "qwen3_5"])
def test_a_model_that_keeps_states_drafts_for_no_other(
    folders: dict[str, Path], tmp_path: Path, variant: str, backend: str
) -> None:
    """What a state has taken in cannot be taken out again where a guess fails; for itself such a model has drafts."""
    folder, _ = make_tiny(variant, tmp_path)
    asked = replace(CONFIG, backend=backend, quantise=None, speculate=f"draft:{folder}")
    with pytest.raises(BackendError) as refused:
        prepare_model(str(folders["llama"]), asked)
    assert str(refused.value) == (
        f"the draft model {folder} cannot draft: it keeps states, which cannot be taken back where a draft fails"
    )


def test_auto_is_taken_beside_others() -> None:
    auto = methods_of("auto")
    head = Method("eagle3", "a/folder")
    assert methods_of("auto,eagle3:a/folder") == (*auto, head)
    assert methods_of("eagle3:a/folder, auto") == (head, *auto)
    assert computing_methods("auto,eagle3:a/folder") == [head]
    with pytest.raises(BadRequestError, match="names a method twice"):
        methods_of("auto,ngram")
    with pytest.raises(BadRequestError, match="speculate must be"):
        methods_of("auto:a/folder")


def test_what_auto_has_looks_up_beside_a_model_that_drafts(folders: dict[str, Path]) -> None:
    assembly = build(str(folders["llama"]), replace(CONFIG, speculate=f"auto,draft:{folders['llama']}"), text=False)
    try:
        assert set(assembly.engine.draft_methods) == {"grammar", "suffix", "ngram", "draft"}
    finally:
        assembly.engine.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [("draft", "draft:FOLDER"), ("draft:", "draft:FOLDER"), ("draft:a,draft:b", "names a method twice")],
)
def test_a_method_that_is_not_well_named(folders: dict[str, Path], asked: str, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        build(str(folders["llama"]), replace(CONFIG, speculate=asked), text=False)


def test_a_model_that_is_not_there(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        build(str(folders["llama"]), replace(CONFIG, speculate=f"draft:{tmp_path / 'nowhere'}"), text=False)


def test_without_tokenizers_sizes_are_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "wider", vocab_size=288)[0]
    with pytest.raises(
        BadRequestError, match=r"wider cannot draft for .*: its vocabulary has 288 tokens, and .* has 256"
    ):
        build(str(folders["llama"]), replace(CONFIG, speculate=f"draft:{other}"), text=False)


def tokenizer(words: list[str], special: tuple[str, ...] = ()) -> Tokenizer:
    backend = Backend(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
    backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    return Tokenizer(
        backend,
        Spelling.BYTE_LEVEL,
        vocab_size=len(words),
        bos_token_id=None,
        eos_token_id=None,
        eos_token_ids=frozenset(),
    )


WORDS = ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("other", "special", "said"),
    [
        (["one", "two", "Three", "four"], (), "token 2 is 'Three' there and 'three' in the model"),
        (WORDS[:3], (), "token 3 is none there and 'four' in the model"),
        ([*WORDS, "five"], (), "token 4 is 'five' there and none in the model"),
        (WORDS, ("two",), "token 1 is the special 'two' there and 'two' in the model"),
    ],
)
def test_tokens_are_compared_one_by_one(
    folders: dict[str, Path], other: list[str], special: tuple[str, ...], said: str
) -> None:
    target, companion = checkpoint_of(folders["llama"], vocab_size=8), checkpoint_of(folders["mistral"], vocab_size=6)
    with pytest.raises(BadRequestError, match=f"have different tokenizers; {said}"):
        refuse_other_tokens(target, companion, tokenizer(WORDS), tokenizer(other, special))


def test_tables_that_are_filled_up_differently_hold_the_same_tokens(folders: dict[str, Path]) -> None:
    """Many a family pads its larger models' tables further; files name such entries, or leave them out."""
    target, companion = checkpoint_of(folders["llama"], vocab_size=8), checkpoint_of(folders["mistral"], vocab_size=6)
    refuse_other_tokens(target, companion, tokenizer(WORDS), tokenizer([*WORDS, "[PAD4]", "[PAD5]"]))
    refuse_other_tokens(target, companion, tokenizer(WORDS), tokenizer(WORDS))


def test_the_same_model_has_the_same_tokens(smollm2: tuple[Checkpoint, Tokenizer]) -> None:
    checkpoint, own = smollm2
    refuse_other_tokens(checkpoint, checkpoint, own, load_tokenizer(checkpoint.path, checkpoint.gguf_metadata))
