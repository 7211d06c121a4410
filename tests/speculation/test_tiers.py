"""Drafters beside KV tiers: answers are those without tiers, and what is proposed behind KV that came back from host
memory, or from disk after a restart, is what the whole text gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.test_tiers import catch_up
from tests.models.heads.published import PublishedHead, medusa_tensors
from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.hybrids import short_prefixes
from tests.speculation.test_heads import CONFIG, GREEDY, Listener, Room, published_chain
from tests.speculation.test_heads import Made as MadeHead
from tests.speculation.test_mtp import with_block
from twostroke import LLM
from twostroke.backends.host.batch import Batch
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.timing import TierTokens
from twostroke.engine.build import assemble, prepare
from twostroke.engine.fleet import FleetSettings
from twostroke.kv.tiers.worth import Worth
from twostroke.models.loading import load_checkpoint
from twostroke.speculation.drafter import Ask, Proposal

KINDS = ("draft", "eagle3", "mtp of deepseek_v3", "mtp of qwen3_5")
"""A model; a head; a model's own block, with latents; one beside layers that keep states."""
BACKENDS = ("reference", "cpu")
POOL_TOKENS = 176
"""That the device has room for: two conversations."""
Chain = Callable[[tuple[int, ...], int], list[int]]
pytestmark = pytest.mark.usefixtures(short_prefixes.__name__)


@dataclass
class Made:
    folder: Path
    speculate: str
    chain: Chain | None
    """What is to be guessed behind known tokens; None: what the model itself says."""


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "loads", lambda *_: True)
    monkeypatch.setattr(Worth, "may_spill", lambda *_: True)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("target")
    if request.param.startswith("mtp"):
        block = with_block(request.param.removeprefix("mtp of "), folder)
        return Made(block.folder, "mtp", block.chain)
    path, model = make_tiny("llama", folder, num_hidden_layers=4)
    if request.param == "draft":
        return Made(path, f"draft:{path}", None)
    torch.manual_seed(5)
    head = PublishedHead(norm_before_residual=True)
    with torch.no_grad():
        head.lm_head.weight *= 4  # guesses that are sure of themselves: a chain goes on
    published = MadeHead("llama", path, model, head, {})
    source = head.save(tmp_path_factory.mktemp("eagle3"))
    return Made(path, f"eagle3:{source}", lambda known, most: published_chain(published, known, most))


def config_of(made: Made, backend: str, speculate: str, kv: KVConfig | None = None) -> EngineConfig:
    """`kv`: of tiers, behind a pool with little room; None: no tiers, and room for everything."""
    kind = None if backend == "reference" else "none"
    config = replace(CONFIG, backend=backend, speculate=speculate, quantise=kind, max_context=112, policy="fifo")
    if kv is None:
        return config
    resolved = prepare(load_checkpoint(made.folder), config).resolved
    memory = resolved.kv_bytes * POOL_TOKENS // resolved.kv_tokens
    return replace(config, kv=replace(kv, memory_bytes=memory))


def open_llm(made: Made, config: EngineConfig) -> LLM:
    llm = LLM.from_assembly(assemble(load_checkpoint(made.folder), None, config))
    if config.speculate != "off":
        llm.engine.scheduler.draft(Room())
    return llm


def turns(num: int = 5) -> list[list[int]]:
    """Conversations that come back when others have been there, a little longer."""
    histories = [[3 + (seed * 17 + place * (seed + 5)) % 240 for place in range(70)] for seed in range(num)]
    return [history[: 50 + 18 * turn] for turn in range(2) for history in histories]


@dataclass
class Heard:
    answers: list[list[int]] = field(default_factory=list)
    tiers: list[TierTokens] = field(default_factory=list)

    @property
    def from_host(self) -> int:
        return sum(own.host for own in self.tiers)

    @property
    def from_disk(self) -> int:
        return sum(own.disk for own in self.tiers)


def play(llm: LLM, prompts: Sequence[list[int]], **sampling: Any) -> Heard:
    heard = Heard()
    for prompt in prompts:
        (result,) = llm.generate([prompt], replace(GREEDY, max_tokens=7, **sampling))
        (sample,) = result.samples
        heard.answers.append(list(sample.token_ids))
        heard.tiers.append(sample.timing.tier_tokens)
        llm.engine.scheduler.check()
        catch_up(llm.engine)
    return heard


@dataclass
class Watched:
    """Between a speculator and a model that drafts: what was known, what was proposed, and the tokens that it read."""

    drafter: Any

    def __post_init__(self) -> None:
        self.heard: list[tuple[list[int], list[int]]] = []
        self.num_read = 0
        self._propose, self._score = self.drafter.propose, self.drafter._model.score
        self.drafter.propose, self.drafter._model.score = self.propose, self.score

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found: list[Proposal] = self._propose(asks)
        for (seq_id, _), proposal in zip(asks, found, strict=True):
            self.heard.append((list(self.drafter._rows[seq_id].tokens), list(proposal.token_ids)))
        return found

    def score(self, batch: Batch) -> Any:
        self.num_read += batch.num_tokens
        return self._score(batch)

    def check(self, texts: Sequence[list[int]]) -> None:
        """It is the model itself: what it proposes is what comes."""
        assert self.heard
        for known, found in self.heard:
            coming = next(text[len(known) :] for text in reversed(texts) if text[: len(known)] == known)
            assert found[: len(coming)] == coming[: len(found)]


def texts_of(prompts: Sequence[list[int]], heard: Heard) -> list[list[int]]:
    return [[*prompt, *answer] for prompt, answer in zip(prompts, heard.answers, strict=True)]


def check_drafts(made: Made, llm: LLM, again: Sequence[list[int]], plain: Heard) -> None:
    """What is proposed behind a prefix that came back."""
    (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
    if made.chain is None:
        watched = Watched(drafter)
        heard = play(llm, again)
        watched.check(texts_of(again, plain))
        assert watched.num_read < sum(map(len, again)) / 2 + 20 * len(again), "what came back is not read once more"
    else:
        listener = Listener(drafter)
        heard = play(llm, again)
        drafts = [(known, most, list(found.token_ids)) for known, most, found in listener.heard]
        assert len(drafts) >= len(again) and all(most for _, most, _ in drafts), "nobody's slots were lost"
        right = [found[:1] == made.chain(known, 1) for known, _, found in drafts]
        exact = llm.assembly.backend_name == "reference"  # native code rounds otherwise: of near ones, another is first
        assert all(right) if exact else sum(right) >= 0.7 * len(right)
    assert heard.answers == plain.answers
    assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_and_drafts_do_not_depend_on_tiers(made: Made, backend: str, tmp_path: Path) -> None:
    prompts, num = turns(), len(turns()) // 2
    with open_llm(made, config_of(made, backend, "off")) as llm:
        plain = play(llm, prompts)
    again = Heard(plain.answers[num:])
    config = config_of(made, backend, made.speculate, KVConfig(host_gb=0.03, disk=str(tmp_path), disk_gb=0.2))
    with open_llm(made, config) as llm:
        assert any(group.model for group in llm.engine.scheduler.ledger.layout.groups)
        assert play(llm, prompts[:num]).answers == plain.answers[:num]
        check_drafts(made, llm, prompts[num:], again)
        assert llm.engine.scheduler.counts().tier_hit_tokens.host >= 32 * (num - 2)
    with open_llm(made, config) as llm:  # a restart finds what was written
        check_drafts(made, llm, prompts[num:], again)
        assert llm.engine.scheduler.counts().tier_hit_tokens.disk >= 32 * num


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_nobody_drafted_for_comes_back_as_such(made: Made, backend: str, tmp_path: Path) -> None:
    """Its blocks hold the model's KV alone: the drafter catches up with it, or begins behind it."""
    prompts, num = turns(), len(turns()) // 2
    config = config_of(made, backend, made.speculate, KVConfig(host_gb=0.03, disk=str(tmp_path), disk_gb=0.2))
    with open_llm(made, config) as llm:
        undrafted = play(llm, prompts, speculation=NO_DRAFTS)
    with open_llm(made, config) as llm:
        (drafter,) = llm.engine.backend.companion_drafters  # type: ignore[attr-defined]
        listener = Watched(drafter) if made.chain is None else Listener(drafter)
        heard = play(llm, prompts[num:])
        if isinstance(listener, Watched):
            listener.check(texts_of(prompts, undrafted))
        elif backend == "reference" or made.speculate == "mtp":  # native code blanks what it lacks
            assert listener.heard and all(most == 0 for _, most, _ in listener.heard), "it begins behind that"
        assert heard.answers == undrafted.answers[num:]
        assert heard.from_disk >= 32 * num
        assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]


def test_kv_of_another_drafter_is_not_found(made: Made, tmp_path: Path) -> None:
    """Nor that of the same model without one: a folder has files of both."""
    if made.speculate == "mtp":
        pytest.skip("a model has one such block")
    kv = KVConfig(host_gb=0.03, disk=str(tmp_path / "kv"), disk_gb=0.2)
    prompts = turns(3)[:3]
    with open_llm(made, config_of(made, "reference", made.speculate, kv)) as llm:
        play(llm, prompts)
    with open_llm(made, config_of(made, "reference", "off", kv)) as llm:
        assert play(llm, prompts).from_disk == 0
    method = made.speculate.partition(":")[0]
    torch.manual_seed(6)
    other = make_tiny("llama", tmp_path / "o")[0] if method == "draft" else PublishedHead().save(tmp_path / "o")
    with open_llm(made, config_of(made, "reference", f"{method}:{other}", kv)) as llm:
        assert play(llm, prompts).from_disk == 0
    with open_llm(made, config_of(made, "reference", made.speculate, kv)) as llm:
        assert play(llm, prompts).from_disk > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_keep_nothing_work_beside_tiers(backend: str, tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path / "target", num_hidden_layers=4)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    save_file(medusa_tensors(3, 1, False), tmp_path / "medusa_lm_head.safetensors")
    made, prompts = Made(path, f"medusa:{tmp_path}", None), turns()
    with open_llm(made, config_of(made, backend, "off")) as llm:
        plain = play(llm, prompts)
    with open_llm(made, config_of(made, backend, made.speculate, KVConfig(host_gb=0.03))) as llm:
        heard = play(llm, prompts)
        assert heard.answers == plain.answers and heard.from_host >= 32 * 3
        assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]


def test_a_fleet_does_not_take_a_drafters_kv(made: Made) -> None:
    with pytest.raises(BadRequestError, match="an engine of a fleet does not work beside a model or a head that"):
        assemble(
            load_checkpoint(made.folder),
            None,
            config_of(made, "reference", made.speculate),
            FleetSettings(key="00" * 32),
        )
