"""A model's own MTP block drafts, beside layers that keep states: answers are those without it; and what it proposes,
in every way that a stream can take, is what transformers' `MtpLayer` gives for the whole text from the beginning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel

from tests.models.tiny_checkpoints import make_tiny
from tests.speculation.hybrids import CHUNKED, Mended, answers_of, llm_of, num_drafts, short_prefixes
from tests.speculation.test_heads import CONFIG, GREEDY, PROMPTS, SAMPLING, Listener, tokens
from twostroke.backends.host.head_drafter import LEAST_SURVIVAL
from twostroke.backends.host.mtp import MetExperts
from twostroke.config import EngineConfig
from twostroke.models.heads import mtp
from twostroke.models.loading import load_checkpoint

BESIDE = ("qwen3_5", "qwen3_next", "qwen3_5_moe")
"""Dense, and with experts."""
BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""With latents, and with keys and values; all with experts."""
NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "mtp_block.": "layers.0.",
    "post_norm.": "norm.",
}
"""What transformers calls the parts of a block, and what published files do."""
pytestmark = pytest.mark.usefixtures(short_prefixes.__name__)


@dataclass
class Made:
    folder: Path
    model: Any
    block: MtpLayer

    def chain(self, known: Sequence[int], most: int, least_survival: float = LEAST_SURVIVAL) -> list[int]:
        """What the block guesses behind these tokens: the whole text at once."""
        with torch.no_grad():
            read = self.model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
            states, entered, guesses, survival = list(read.hidden_states[-1][0]), list(known[1:]), [], 1.0
            while len(guesses) < most and survival >= least_survival:
                state = self.run(entered, states)
                scores = self.model.lm_head(state)
                best = int(scores.argmax())
                survival *= float(scores.softmax(dim=-1)[best])
                states.append(state)
                entered.append(best)
                guesses.append(best)
        return guesses

    def shortfall(self, known: Sequence[int], guess: int) -> float:
        """How far a guess behind these tokens scores below the best, in the scores' spread."""
        with torch.no_grad():
            read = self.model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
            scores = self.model.lm_head(self.run(known[1:], list(read.hidden_states[-1][0])))
        return float((scores.max() - scores[guess]) / scores.std())

    def run(self, entered: Sequence[int], states: Sequence[torch.Tensor]) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor([list(entered)]))
        places = torch.arange(1, 1 + len(entered))[None]
        decoder = self.model.get_decoder()
        mask = torch.full((len(entered),) * 2, -torch.inf).triu(1)[None, None]
        # Of three positions a token, which are the same for text; some versions expand them themselves.
        by_kind = places.expand(3, 1, -1) if hasattr(decoder.rotary_emb, "mrope_section") else places
        rotary = decoder.rotary_emb(embedded, position_ids=by_kind)
        found = self.block(embedded, torch.stack(list(states))[None], rotary, mask, places, None)
        return found[0, -1]


def with_block(variant: str, folder: Path, **changes: Any) -> Made:
    return behind(variant, folder, **changes) if variant in BEHIND else beside(variant, folder, **changes)


def behind(variant: str, folder: Path, **changes: Any) -> Made:
    """Published as one layer more, which transformers' own loader finds, too."""
    path, _ = make_tiny(variant, folder, num_hidden_layers=3, **changes)
    config, file = json.loads((path / "config.json").read_text()), path / "model.safetensors"
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    config |= {
        name: own[:2] for name in ("layer_types", "mlp_layer_types") if isinstance(own := config.get(name), list)
    }
    (path / "config.json").write_text(json.dumps(config))
    stored, hidden = load_file(file), config["hidden_size"]
    torch.manual_seed(9)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"model.layers.2.{name}.weight"] = 2 + torch.randn(hidden) / 5
    stored["model.layers.2.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 1.5 / (2 * hidden) ** 0.5
    for name, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        stored[f"model.layers.2.{name}.weight"] = stored[f"{own}.weight"].clone()
    save_file(stored, file, {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    loaded._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # there are the published models' numbers
    loaded.config.num_mtp_layers, loaded.config.mtp_mlp_layer_types = 1, ["sparse"]  # of GLM-4.7-Flash it does not say
    blocks = MtpModel.from_pretrained(loaded).eval()
    assert torch.equal(blocks.layers[0].enorm.weight, stored["model.layers.2.enorm.weight"])
    return Made(path, loaded, blocks.layers[0])


def beside(variant: str, folder: Path, **changes: Any) -> Made:
    path, model = make_tiny(variant, folder, **changes)
    torch.manual_seed(9)
    decoder, config = model.get_decoder(), model.config.get_text_config()
    place = max(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
    norm = type(decoder.norm)
    block = MtpLayer(config, type(decoder.layers[place]), norm, place).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.2 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5)
    file = path / "model.safetensors"
    stored = load_file(file)
    for name, value in block.state_dict().items():
        part = next(part for part in NAMES if name.startswith(part))
        stored[f"mtp.{NAMES[part]}{name.removeprefix(part)}"] = value.contiguous()
    save_file(stored, file, {"format": "pt"})
    return Made(path, model, block)


@pytest.fixture(scope="module", params=(*BESIDE, *BEHIND))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return with_block(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_answers_are_those_without_it(made: Made, backend: str) -> None:
    check_answers(made.folder, backend)


def check_answers(model: Path, backend: str) -> None:
    """Greedy, drawn, several answers, logprobs, in chunks; the second time prefixes are found again."""
    with llm_of(model, backend, "off") as llm:
        plain = llm.generate(PROMPTS, SAMPLING)
    with llm_of(model, backend, "mtp") as llm:
        Mended(llm.engine.backend.companion_drafters[0], answers_of(PROMPTS, plain))  # type: ignore[attr-defined]
        for _ in range(2):
            drafted = llm.generate(PROMPTS, SAMPLING)
            assert tokens(drafted) == tokens(plain)
            assert llm.engine.backend.speculator.faults == []  # type: ignore[attr-defined]
            computed, held = num_drafts(drafted)
            assert computed >= 20 and held >= 10
            llm.engine.scheduler.check()
        assert drafted[0].samples[0].timing.cached_tokens > 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("config", [CONFIG, CHUNKED], ids=["whole", "chunked"])
def test_what_is_proposed_is_what_the_whole_text_gives(made: Made, backend: str, config: EngineConfig) -> None:
    check_proposals(made, made.folder, backend, config)


def check_proposals(made: Made, model: Path, backend: str, config: EngineConfig) -> None:
    """`model`: the file or folder that holds what transformers runs."""
    with llm_of(model, backend, "mtp", config) as llm:
        listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
        for _ in range(20):  # which stream has room for several guesses is the clock's affair
            llm.generate(PROMPTS, replace(GREEDY, max_tokens=8))
            if len(listener.heard) >= 40 and any(len(proposal.token_ids) > 1 for _, _, proposal in listener.heard):
                break
    heard = [one for one in listener.heard if one[1]]
    assert len(heard) == len(listener.heard) >= 12  # nobody's slots were lost
    chains = [(list(proposal.token_ids), made.chain(known, most)) for known, most, proposal in heard]
    if backend == "reference":
        assert all(found == expected for found, expected in chains)
    else:  # the model's own states are rounded otherwise: of guesses that are nearly equal, another may be first
        worst = max(made.shortfall(known, proposal.token_ids[0]) for known, _, proposal in heard)
        assert worst < 0.05
    assert max(len(proposal.token_ids) for _, _, proposal in heard) >= 2


def test_experts_are_expanded_as_tokens_meet_them(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more are kept than were planned for, and what is proposed stays: here as few as one token meets."""
    monkeypatch.setattr(mtp, "KEPT_TIMES", 1)
    head = mtp.load_mtp(load_checkpoint(made.folder))
    moe, floats = head.spec.layer.moe, {name: tensor.to_float32() for name, tensor in head.tensors.items()}
    everything = sum(value.size for value in floats.values())
    if moe is None:
        assert mtp.expanded_values(head) == everything
        return
    of_experts = sum(value.size for name, value in floats.items() if name.startswith("experts."))
    kept = moe.experts_per_token
    assert kept < moe.num_experts
    assert mtp.expanded_values(head) == everything - of_experts + of_experts * kept // moe.num_experts
    experts = MetExperts(head.tensors, kept)
    for expert in (*range(moe.num_experts), 0, 0):
        for name, value in experts[expert].items():
            assert np.array_equal(value, floats[f"experts.{expert}.{name}"])
        assert len(experts) <= kept
    with llm_of(made.folder, "reference", "mtp") as llm:
        network: Any = llm.engine.backend.companion_drafters[0]._network  # type: ignore[attr-defined]
        listener = Listener(llm.engine.backend.companion_drafters[0])  # type: ignore[attr-defined]
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=8))
        assert len(network._experts) == kept
    heard = [(list(one.token_ids), made.chain(known, most)) for known, most, one in listener.heard if most]
    assert len(heard) > 3 and all(found == expected for found, expected in heard)
