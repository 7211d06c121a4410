"""What a plan says of a model, a device, a format or a cut that this engine does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.test_estimate import plan

from twostroke.config import EngineConfig
from twostroke.core.formats import Formats
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import DEVICES, find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.models.families import FAMILIES
from twostroke.models.features import COMPUTED, uncomputed
from twostroke.planner.asked.model import read_model
from twostroke.planner.asked.wish import DeploymentWish, Wish
from twostroke.planner.deployment import Deployment
from twostroke.planner.not_run import not_run

LLAMA = dimensions_from_config(KNOWN_SHAPES["Llama-3.1-8B"].config)
MIXTURE = dimensions_from_config(KNOWN_SHAPES["Qwen3-30B-A3B"].config)
RUN = Deployment("Llama-3.1-8B", LLAMA, find_device("h200"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"formats": Formats.of("bf16", "f16")}, None),
        ({"formats": Formats.of("fp8")}, None),
        ({"dimensions": MIXTURE}, None),
        ({"dimensions": MIXTURE, "formats": Formats.of("fp8")}, None),
        ({"formats": Formats.of("q4_k")}, None),
        *(({"formats": Formats.of(kind), "is_made": True}, None) for kind in ("fp8", "int4", "q8_0", "q4_1", "f16")),
        *(
            (
                {"formats": Formats.of(kind), "is_made": True},
                f"keeps {kind} only where files have it: {kind} is planned",
            )
            for kind in ("q4_k", "q5_0", "nvfp4", "int8")
        ),
        ({"dimensions": MIXTURE, "formats": Formats.of("mxfp4")}, None),
        ({"own_shape": RUN.shape}, None),
        ({"own_shape": RUN.shape, "formats": replace(Formats.of("bf16"), stored="Q4_K")}, None),
        ({"own_shape": RUN.shape, "formats": replace(Formats.of("bf16"), stored="IQ2_XS")}, "brings iq2_xs to 16 bits"),
        ({"dimensions": MIXTURE, "own_shape": RUN.shape}, None),
        ({"formats": Formats.of("bf16", "fp8")}, None),
        ({"formats": Formats.of("bf16", "f32")}, "keeps KV in 16 or 8 bits: f32 is planned, not run"),
        (
            {"tensor_parallel": 2},
            "ranks on several devices are written and were not run: 2 are planned, not run",
        ),
        (
            {"pipeline_parallel": 2},
            "this engine has no stages and no groups of experts: 2 are planned, not run",
        ),
        ({"device": find_device("b200")}, "this engine has not been run on B200 yet"),
        ({"device": find_device("mi325x"), "formats": Formats.of("mxfp4")}, "this engine does not run on MI325X"),
        ({"device": find_device("m4 max")}, "this engine does not run on Apple M4 Max"),
        ({"own_kv_space_bytes": 1, "formats": Formats.of("fp8")}, None),  # this machine's own backend said so
    ],
)
def test_a_deployment_says_what_was_not_run_of_it(change: dict[str, object], sentence: str | None) -> None:
    reasons = not_run(replace(RUN, **change))
    assert len(reasons) == (sentence is not None)
    if sentence is not None:
        assert sentence in reasons[0]


@pytest.mark.parametrize(("kind", "is_said"), [("q4_k", True), ("nvfp4", True), ("q8_0", False), ("bf16", False)])
def test_what_no_card_makes_of_floats_is_said_where_it_is_asked_for(kind: str, is_said: bool) -> None:
    deployment, _ = Wish(read_model("Llama-3.1-8B"), DeploymentWish(quantise=kind), EngineConfig()).on("h200")
    assert any("as it loads them" in reason for reason in not_run(deployment)) == is_said


def test_what_a_model_is_published_in_is_no_wish() -> None:
    deployment, _ = Wish(read_model("gpt-oss-20b"), DeploymentWish(), EngineConfig()).on("h200")
    assert deployment.kept == "mxfp4" and not deployment.is_made and not_run(deployment) == ()


def test_a_plan_says_it_first() -> None:
    assert plan("DeepSeek-V3", "mi325x").notes[0].startswith("this engine does not run on MI325X")


def test_every_family_that_is_not_run_says_why_and_every_other_is_read_as_before_a_run() -> None:
    assert {family.name for family in FAMILIES if family.not_run is not None} == {"cohere2", "phi"}
    for name, known in KNOWN_SHAPES.items():
        assert dimensions_from_config(known.config).not_run is None, name


@pytest.mark.parametrize("name", ["Nemotron-3-Nano-30B-A3B", "LFM2-1.2B"])
def test_layers_of_all_kinds_run_on_cards(name: str) -> None:
    dimensions = dimensions_from_config(KNOWN_SHAPES[name].config)
    assert not [one for one in not_run(replace(RUN, dimensions=dimensions)) if "does not run this model" in one]


def test_what_a_card_does_not_compute_is_said_of_cards_alone() -> None:
    dimensions = replace(LLAMA, spec=replace(LLAMA.spec, head_bias=True))
    lacking = [one for one in not_run(replace(RUN, dimensions=dimensions)) if "does not run this model" in one]
    sentence = "it has no biases on the last norm and the output head"
    assert lacking == [f"on a GPU this engine does not run this model: its cuda backend says that {sentence}"]
    elsewhere = replace(RUN, dimensions=dimensions, device=find_device("m4 max"))
    assert not_run(elsewhere) == (elsewhere.device.not_run,)


def test_every_known_shape_is_run_on_some_backend() -> None:
    for name, known in KNOWN_SHAPES.items():
        spec = dimensions_from_config(known.config).spec
        assert any(uncomputed(spec, backend) is None for backend in COMPUTED), name


def test_one_device_has_run() -> None:
    assert [device.name for device in DEVICES if device.has_run] == ["H200"]
