"""`twostroke plan` as a user types it. The numbers behind it are held in tests/planner and tests/cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import typed
from tests.cli.test_cli import twostroke
from tests.models.quantised.folders import make_quantised
from tests.models.tiny_checkpoints import make_tiny, variants
from tests.models.tiny_gguf import write_gguf

from twostroke.backends.cpu import ceilings
from twostroke.backends.cpu.ceilings import MachineRates
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.cost.calibration import Calibration
from twostroke.cost.config_shape import dimensions_from_config, shape_from_config
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.step_cost import Coefficients
from twostroke.engine.build import prepare_model
from twostroke.models.loading import load_checkpoint
from twostroke.planner.asked.model import PlannedModel, read_model, weightless


def test_a_plan_says_everything_with_its_source() -> None:
    done = twostroke("plan", "Llama-3.1-70B", "--on", "h200", "--tensor-parallel", "2", "--users", "64", "--matrices")
    assert done.returncode == 0, done.stderr
    for text in (
        "70.55B parameters",
        "2 x H200",
        "9.08 USD/h",
        "yes: 141.1 GB of weights in 301.5 GB",
        "327.7 kB a token",
        "alone: TTFT",
        "141 ms",  # 282 ms over two devices
        "least TPOT",
        "14.5 ms",  # 139.0 GB over 9.6 TB/s
        "64 users: TPOT",
        "USD a million output tokens",
        "prompts take",
        "ridge 206 FLOP/byte",
        "of the floor in prefill and",
        "bench/results/cuda-bench.txt",
        "tensor parallelism was not measured",
        "NVIDIA H200 Tensor Core GPU data sheet",
        "28672x8192",
    ):
        assert text in done.stdout, text


def test_what_does_not_fit_says_what_would() -> None:
    done = typed("plan", "Llama-3.1-70B", "--on", "h100")
    assert done.returncode == 0
    assert "NO: 141.1 GB of weights in 85.9 GB; it takes --tensor-parallel 2" in done.stdout
    assert "41.5 ms" in done.stdout and "USD a million" not in done.stdout


def test_copies_for_decode_are_told_apart_from_weights() -> None:
    done = typed("plan", "Llama-3.1-8B", "--on", "h200", "--users", "64", "--matrices", COLUMNS="200")
    for text in (
        "yes: 16.1 GB of weights and 11.3 GB of copies in 150.8 GB, 114.4 GB for KV",
        "15.0 GB of the weights are held twice: in 16 bits for long prompts, and 11.3 GB more in 12 bits for decode",
        "steps of few tokens (up to 256)",
        "11.3 GB of weights and the context",
        "where decode reads copies in 12",
    ):
        assert text in done.stdout, text
    packed, plain = (
        json.loads(typed("plan", "Llama-3.1-8B", "--on", "h200", "--json", "--decode-weights", form).stdout)
        for form in ("auto", "plain")
    )
    assert packed["memory"]["decode_copies_bytes"] == packed["decode_weights"]["dense"]["num_bytes"] > 11e9
    assert plain["decode_weights"] is None and plain["memory"]["decode_copies_bytes"] == 0
    assert plain["notes"] == ["decode weights plain (asked for)"]
    assert plain["memory"]["weight_bytes"] == packed["memory"]["weight_bytes"]
    assert packed["alone"]["tpot"]["floor_s"] < 0.77 * plain["alone"]["tpot"]["floor_s"]
    done = typed("plan", "Llama-3.1-8B", "--search", "--users", "9", "--on", "h200", "--quantise", "bf16")
    assert "bf16, 12 bits" in done.stdout


def test_json_is_json() -> None:
    done = typed("plan", "gpt-oss-120b", "--on", "h200", "--count", "4", "--tensor-parallel", "2", "--json")
    record = json.loads(done.stdout)
    assert (record["devices"], record["replicas"], record["weights"]) == (4, 2, "mxfp4")
    assert record["active_parameters"] == pytest.approx(5.13e9, rel=0.01)
    assert record["alone"]["ttft"]["floor_s"] < record["alone"]["ttft"]["expected_s"]
    assert record["in_company"]["expected"]["users"] == record["memory"]["max_users"]
    alone, used = record["alone"], record["efficiency"]
    assert used["prefill_share"] == pytest.approx(alone["ttft"]["floor_s"] / alone["ttft"]["expected_s"])
    assert used["decode_share"] == pytest.approx(alone["tpot"]["floor_s"] / alone["tpot"]["expected_s"])
    done = typed("plan", "Llama-3.1-70B", "--on", "h100", "--json")
    assert json.loads(done.stdout)["in_company"] is None


def test_search_is_cheapest_first() -> None:
    arguments = ("--search", "--users", "100", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "50")
    done = typed("plan", "Llama-3.1-70B", *arguments, "--json")
    record = json.loads(done.stdout)
    prices = [one["usd_per_hour"] for one in record["found"]]
    assert prices == sorted(prices) and len(prices) > 3
    assert all(one["tpot_s"] <= 0.05 and one["ttft_s"] <= 2.0 for one in record["found"])
    assert {one["reason"] for one in record["rejected"]} >= {"does not fit"}
    for one in record["found"]:  # every estimate says how far it may be off, and what this engine did not run of it
        devices = one["tensor_parallel"] * one["pipeline_parallel"] * one["expert_parallel"]
        has_run = (one["device"], devices) == ("H200", 1) and one["weights"] in ("bf16", "fp8", "int4")
        assert has_run == (one["not_run"] == [])
        if one["device"].startswith("MI"):
            assert one["not_run"][0].startswith(f"this engine does not run on {one['device']}: it has backends for")
        stated = one["efficiency"]["error"]
        assert "larger than any measured" in stated and (one["device"] == "H200" or f"no {one['device']} was" in stated)
    done = typed("plan", "Llama-3.1-70B", *arguments, "--on", "h200", "--on", "b200")
    assert "USD/M out" in done.stdout and "RTX" not in done.stdout
    assert "error of the first  unknown: 71B parameters" in done.stdout
    # The cheapest is a cut, or a format, or a card that this engine never ran: it says so, and names what it has run.
    assert "first has not run" in done.stdout and "cheapest that has" in done.stdout
    done = typed("plan", "Llama-3.1-70B", *arguments, "--on", "h200", "--efficiency", "0.4")
    assert "as given with --efficiency" in done.stdout and "not measured" in done.stdout
    assert "bench/results" not in done.stdout
    done = typed("plan", "Llama-3.1-8B", "--search", "--rate", "2", "--output", "50", "--on", "h200")
    assert done.returncode == 0 and "the first one simulated" in done.stdout and "p99" in done.stdout
    done = typed("plan", "Llama-3.1-8B", "--search", "--rate", "2", "--output", "50", "--on", "h200", "--json")
    record = json.loads(done.stdout)
    tail, mean_s = record["first_simulated"], record["found"][0]["ttft_s"]
    assert tail["met_share"] == 1.0 and tail["requests_per_s"] == 2 / record["found"][0]["replicas"]
    assert tail["ttft_s"]["p99"] >= tail["ttft_s"]["p50"] > 0.2 * mean_s
    # What the means allow and the simulation does not gets more copies, or is not said to meet the level.
    level = ("--slo-ttft-ms", "47", "--quantise", "bf16", "--on", "h200", "--output", "50", "--json")
    done = typed("plan", "Llama-3.1-8B", "--search", "--rate", "6", *level)
    record = json.loads(done.stdout)
    tail = record["first_simulated"]
    assert record["meets_the_level"] == (tail["met_share"] >= 0.9) == (done.returncode == 0)
    assert record["found"][0]["tensor_parallel"] > 1 or record["found"][0]["replicas"] > 1
    done = typed("plan", "Llama-3.1-70B", "--search", "--rate", "1", "--slo-tpot-ms", "0.001", "--on", "h200")
    assert done.returncode == 1 and "nothing meets it, of 30 that were tried; nearest are:" in done.stdout
    shown = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert len(shown) == 3 and all("too slow for one user" in line for line in shown)
    assert shown[0].startswith("  8 x H200, 8 to a copy of the model, int4")


def test_the_machine_under_us(smollm2_path: Path, tmp_path: Path) -> None:
    sizes = ("--input", "200", "--output", "50")
    done = typed("plan", str(smollm2_path), "--on", "this", *sizes, TWOSTROKE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "as this engine holds them" in done.stdout and "measured on this machine" in done.stdout
    assert "bench/results/cpu-" in done.stdout


def test_a_model_that_is_not_here_on_the_machine_under_us(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its sizes and the machine's ceilings, and what another model taught of the machine. The ceilings are given:
    a busy moment would change one of them and not the other."""
    monkeypatch.setattr(ceilings, "machine_rates", lambda isa, n: MachineRates(20e9, 400e9, 100e9, isa.name, n))
    folder, sizes = {"TWOSTROKE_CACHE": str(tmp_path)}, ("--on", "this", "--input", "200", "--output", "50")
    done = typed("plan", "Llama-3.2-1B", *sizes, "--json", **folder)
    record = json.loads(done.stdout)
    assert done.returncode == 0 and "unknown: Llama-3.2-1B was never run here" in record["efficiency"]["error"]
    # 1.24B parameters in Q8_0, whose blocks of 32 take 34 bytes.
    assert record["memory"]["weight_bytes"] == pytest.approx(1.236e9 * 34 / 32, rel=0.01)
    assert record["alone"]["tpot"]["expected_s"] > record["alone"]["tpot"]["floor_s"]
    # Eight times the weights of SmolLM2-135M of the same machine take about as many times as long.
    prepared = prepare_model(str(smollm2_path), EngineConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_CACHE", str(tmp_path))
        found = Calibration(prepared.ceilings(), Coefficients(weights_alone=1.5), 0.0, 0.125, 9, "yesterday")
        prepared.keep_calibration(found)
        assert prepared.calibration() == prepared.calibration_of_another() != found
    taught = json.loads(typed("plan", "Llama-3.2-1B", *sizes, "--json", **folder).stdout)
    assert "calibrate on this machine with" in taught["efficiency"]["source"]
    assert "unknown: Llama-3.2-1B was not measured here; of" in taught["efficiency"]["error"]
    assert "12.5% of a step" in taught["efficiency"]["error"]
    weights_s = 1.5 * record["alone"]["minimum_decode_s"]
    assert taught["alone"]["tpot"]["expected_s"] == pytest.approx(weights_s, rel=0.2)
    done = typed("plan", "Llama-3.1-405B", *sizes, **folder)
    assert done.returncode == 0 and "NO: " in done.stdout
    done = typed("plan", "Nemotron-3-Nano-30B-A3B", *sizes, **folder)
    assert done.returncode == 0 and "does not run" not in done.stdout  # on a card it would not


def test_a_model_that_no_backend_runs_is_not_planned_on_the_machine_under_us() -> None:
    config = {**KNOWN_SHAPES["Llama-3.2-1B"].config, "model_type": "phi"}
    with pytest.raises(BadRequestError, match="this engine does not run phi models"):
        weightless(PlannedModel("phi", dimensions_from_config(config), "bf16", None, config))


def test_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    done = typed("plan", "Llama-3.1-8B", "--on", "h200", "--plot", str(path))
    assert done.returncode == 0 and f"plot: {path}" in done.stderr
    assert "</svg>" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-9", "--on", "h200"), "cannot plan 'llama-9': it is no file or folder here"),
        (("Llama-3.1-8B", "--on", "h2000"), "there is no device 'h2000'; did you mean H200"),
        (("Llama-3.1-8B", "--on", "h200", "--on", "h100"), "one --on at a time"),
        (("Llama-3.1-8B", "--on", "this", "--pipeline-parallel", "2"), "one device, and no --quantise"),
        (("Llama-3.1-8B", "--count", "3", "--tensor-parallel", "2"), "must be a multiple of the"),
        (("Llama-3.1-8B", "--count", "0"), "must be a multiple of the"),
        (("Llama-3.1-8B", "--expert-parallel", "2"), "has no experts"),
        (("Llama-3.1-8B", "--pipeline-parallel", "64"), "cannot be cut into 64 stages"),
        (("Llama-3.1-8B", "--quantise", "fp3"), "no quantisation 'fp3'"),
        (("Llama-3.1-8B", "--input", "0"), "input must be from 1"),
        (("Llama-3.1-8B", "--cached", "2000"), "cached must be below input"),
        (("Llama-3.1-8B", "--price", "-1"), "--price must be a number above 0 and at most 100000, not -1"),
        (("Llama-3.1-8B", "--price", "nan"), "--price must be a number above 0 and at most 100000, not nan"),
        (("Llama-3.1-8B", "--efficiency", "2"), "efficiency must be"),
        (("Llama-3.1-8B", "--efficiency", "a,b"), "efficiency must be"),
        (("Llama-3.1-8B", "--rate", "3"), "belong to --search"),
        (("Llama-3.1-8B", "--search"), "give one of the two"),
        (("Llama-3.1-8B", "--search", "--rate", "nan"), "--rate must be a number above 0, not nan"),
        (("Llama-3.1-8B", "--search", "--users", "9", "--tensor-parallel", "2"), "--search tries every cut"),
        (("Llama-3.1-8B", "--search", "--users", "9", "--count", "2"), "--search tries every cut"),
        (("Llama-3.1-8B", "--search", "--users", "9", "--from-server", "http://a"), "it goes with no"),
        (("Llama-3.1-8B", "--search", "--users", "9", "--matrices"), "it goes with no"),
        (("Llama-3.1-8B", "--from-server", "http://127.0.0.1:9"), "cannot be read"),
        (("Llama-3.1-8B", "--plot", "plot.exe"), "ends in .png"),
        (("Llama-3.1-8B", "--decode-weights", "12"), "decode_weights must be one of auto, packed, plain"),
        (("Llama-3.1-8B", "--search", "--users", "9", "--decode-weights", "packed"), "--decode-weights auto or plain"),
        (("Llama-3.1-8B", "--on", "b200", "--decode-weights", "packed"), "and B200 is none"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    done = typed("plan", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_an_unknown_hub_id_says_what_was_tried() -> None:
    done = twostroke("plan", "nobody/nothing-at-all", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "the Hub gave nothing" in done.stderr


@pytest.mark.parametrize("text", ["", "[]", "{", "7", '{"model_type": "llama"}', "[" * 100_000])
def test_bad_config_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for name in (str(path), str(tmp_path)):
        with pytest.raises(ModelError):
            read_model(name)


def test_a_folder_is_known_by_its_config_and_by_its_files(tmp_path: Path) -> None:
    folder, _ = make_tiny("qwen3_moe", tmp_path)
    planned = read_model(str(folder))
    assert planned.weights == "f32" and planned.checkpoint is not None
    assert planned.dimensions == dimensions_from_config(json.loads((folder / "config.json").read_text()))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    assert read_model(str(folder)).checkpoint is None  # a config alone is enough to plan


def test_quantised_folders_say_so_themselves(tmp_path: Path) -> None:
    folder, _ = make_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for method, weights in (("fp8", "fp8"), ("mxfp4", "mxfp4"), ("awq", "int4"), ("gptq", "int4")):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        assert read_model(str(folder)).weights == weights


@pytest.mark.parametrize(
    ("form", "weights"), [("ct_int4", "int4"), ("ct_int8", "int8"), ("ct_nvfp4", "nvfp4"), ("modelopt_fp8", "fp8")]
)
def test_quantised_folders_are_planned_in_their_own_bits(form: str, weights: str, tmp_path: Path) -> None:
    folder, _ = make_quantised(form, tmp_path)
    planned = read_model(str(folder))
    assert planned.weights == weights and planned.checkpoint is not None
    shape = planned.file_shape(16.0)
    assert shape is not None and shape.weight_bytes == planned.checkpoint.weight_bytes


@pytest.mark.parametrize("variant", variants())
def test_a_loaded_spec_counts_as_its_config_does(variant: str, tmp_path: Path) -> None:
    folder, model = make_tiny(variant, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for stored in (folder, write_gguf(model, tmp_path / "tiny.gguf")) if variant in ("llama", "gemma2") else (folder,):
        spec = load_checkpoint(stored).spec
        bits = {"weight_bits": 16.0, "kv_bits": 16.0}
        assert Dimensions(spec).shape(**bits) == shape_from_config(config, **bits)


def test_a_gguf_is_planned_in_its_own_bits(smollm2_path: Path) -> None:
    planned = read_model(str(smollm2_path))
    shape = planned.file_shape(16.0)
    assert shape is not None
    assert shape.weight_bytes == 96_576_768  # tests/engine/test_shape.py has it by hand
    assert planned.dimensions.num_parameters == shape.num_parameters == 134_515_008
