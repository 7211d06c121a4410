"""An EAGLE-3 head inside an engine on the device: answers are those without it, and what it drafts, in every way that a
stream can take, is what the published order of its arithmetic gives for the whole text from the beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.counting import counted, counting_head, counting_model
from tests.backends.cuda.drafting_engines import PROMPTS, SIZES, WAYS, drafts_made, engine_of
from tests.backends.cuda.engines import play, request
from tests.models.heads.published import PublishedHead
from tests.models.tiny_checkpoints import make_tiny

from bench.cuda import eagle3 as eagle3_bench
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.interface import Companion
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.request import Request
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Step, StepResult
from twostroke.engine.companions import plan_head
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads.eagle3 import load_eagle3
from twostroke.models.loading import load_checkpoint

TAPS = (1, 2, 3)
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
LAYERS: Mapping[str, dict[str, Any]] = {"granite_hybrid": {"layer_types": KINDS}}
"""What a model of four layers says of them, beside their number."""


@dataclass
class Made:
    """A target as transformers runs it, with a head for it."""

    checkpoint: Checkpoint
    model: Any
    head: PublishedHead
    companion: Companion

    def chain(self, known: Sequence[int], count: int) -> list[int]:
        """What the head guesses behind these tokens: hidden states by transformers, the whole text at once."""
        with torch.no_grad():
            read = self.model(input_ids=torch.tensor([known[:-1]]), use_cache=False, output_hidden_states=True)
            # A stream that is divided by what each block's output is multiplied with elsewhere: Granite's.
            down = getattr(self.model.config, "residual_multiplier", 1.0)
            joined = self.head.join(torch.cat([read.hidden_states[tap][0] / down for tap in TAPS], dim=-1))
            embedding = self.model.get_input_embeddings().weight
            states, entered = list(joined), list(known[1:])
            for _ in range(count):
                hidden, scores = self.head(embedding[torch.tensor(entered)], torch.stack(states))
                states.append(hidden[-1])
                entered.append(int(self.head.target_ids[int(scores[-1].argmax())]))
        return entered[len(known) - 1 :]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llama", tmp_path_factory.mktemp("llama"))


def make(variant: str, folder: Path) -> Made:
    path, model = make_tiny(variant, folder / "target", num_hidden_layers=4, **LAYERS.get(variant, {}))
    torch.manual_seed(5)
    head = PublishedHead(norm_before_residual=True)
    checkpoint = load_checkpoint(path)
    loaded = load_eagle3(head.save(folder / "head"), checkpoint.spec)
    return Made(checkpoint, model, head, plan_head(loaded, 1, REFERENCE).companion)


def requests_of(**sampling: Any) -> list[Request]:
    return [request(f"r{index}", prompt, max_tokens=12, **sampling) for index, prompt in enumerate(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_answers_are_those_without_and_drafts_those_of_the_whole_text(made: Made, way: str, device: str) -> None:
    """Drafts hold or not, prompts come in chunks, prefixes are found again, streams give way."""
    found = drafts_made(made.checkpoint, made.companion, requests_of(), WAYS[way], device)
    assert len(found) >= 20
    for known, length, drafts in found:
        assert drafts == made.chain(known[:length], len(drafts)), length


def test_drafts_that_hold_are_counted_and_answers_stay(device: str) -> None:
    """Also on a card, in graphs: a model that counts, and a head that knows the next token, if its vocabulary does."""
    sizes = replace(SIZES, step_tokens=12, num_blocks=5)
    engine = engine_of(counting_model(), counting_head(), sizes, device)
    prompts = [list(range(20)), [3, 9]]
    requests = [request(f"r{index}", prompt, max_tokens=14) for index, prompt in enumerate(prompts)]
    requests.append(request("off", [8, 8, 8], max_tokens=3, speculation=NO_DRAFTS))
    held = []
    apply = engine.scheduler.apply

    def watch(step: Step, result: StepResult, *rest: Any, **named: Any) -> Any:
        held.extend((drafted, result.sampled[seq_id]) for seq_id, drafted in result.drafted.items())
        return apply(step, result, *rest, **named)

    engine.scheduler.apply = watch  # type: ignore[method-assign]
    told = play(engine, requests)
    engine.close()
    assert told.tokens == {
        one.request_id: counted(list(one.prompt_token_ids), one.sampling.max_tokens or 0) for one in requests
    }
    assert len(held) >= 6 and {drafted.method for drafted, _ in held} == {"eagle3"}
    for drafted, came in held:
        assert 1 <= drafted.num_drafts <= 4
        assert len(came) == 1 + bool(came[0].token_id % 5), "the first draft holds where the head knows the token"
    assert engine.backend.unseen.doubt is None  # type: ignore[attr-defined]


def test_the_bench_times_the_steps_that_engines_take(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is run once here, and said to take a time."""
    monkeypatch.setattr(eagle3_bench, "STEP_STREAMS", (1, 2))
    monkeypatch.setattr(eagle3_bench, "median_us", lambda work: work() or 10.0)
    engine = engine_of(counting_model(), counting_head(), SIZES, device)
    assert isinstance(engine.backend, CudaBackend)
    eagle3_bench.step_times(engine.backend)
    engine.close()
    lines = capsys.readouterr().out.splitlines()
    assert sum("nobody's step" in line and "(1.00 x)" in line for line in lines) == 2
