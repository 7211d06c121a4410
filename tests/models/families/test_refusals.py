"""What a config may not say. Each family's valid settings, made by transformers, are spoilt one at a time; whatever
comes in, what comes out is a sound spec or a ModelError that names the setting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.models.tiny_checkpoints import make_tiny
from tests.models.tiny_gguf import write_gguf
from tests.properties import examples

from twostroke.core.errors import ModelError
from twostroke.models.families import FAMILIES, Declared, declared, family_of_config, family_of_gguf
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.gguf import GGUFFile, open_gguf

VARIANTS = ("llama_llama3", "mistral", "qwen2_window", "qwen3", "gemma2", "gemma3", "phi3_partial")
MOE_VARIANTS = ("qwen3_moe", "mixtral")
NEWER = ("gemma4", "gemma4_moe", "minimax_m2", "granite", "olmo3", "ernie4_5", "hunyuan_dense", "hunyuan_moe")
Configs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    made = {}
    for variant in (*VARIANTS, *MOE_VARIANTS, *NEWER):
        folder, _ = make_tiny(variant, tmp_path_factory.mktemp(variant))
        made[variant] = json.loads((folder / "config.json").read_text())
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFFile]:
    made = {}
    for variant in (*VARIANTS, *MOE_VARIANTS, *NEWER):
        folder = tmp_path_factory.mktemp(variant)
        _, model = make_tiny(variant, folder)
        made[variant] = open_gguf(write_gguf(model, folder / "tiny.gguf"))
    return made


def read(config: dict[str, Any]) -> ModelSpec:
    return family_of_config(config["architectures"][0]).spec_from_config(Fields("config.json", config))


def read_gguf(file: GGUFFile, changes: dict[str, Any]) -> ModelSpec:
    name = file.metadata["general.architecture"]
    metadata = {**file.metadata, **{f"{name}.{key}": value for key, value in changes.items()}}
    return family_of_gguf(name).spec_from_gguf(Fields("tiny.gguf", metadata, f"{name}."), file.tensors)


def check_sound(spec: ModelSpec) -> None:
    for attention in {layer.grouped for layer in spec.layers}:
        assert attention.num_heads % attention.num_kv_heads == 0
        assert len(attention.rope.inverse_frequencies(100)) == attention.rope.dim // 2
        assert attention.rope.dim <= attention.head_dim
    assert all(size >= 1 for shape in spec.tensor_shapes().values() for size in shape)


def test_unknown_architectures_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"is not supported; known are: Bert.*, Deepseek.*, Gemma2.*, Llama.*, Phi3"):
        family_of_config("MambaForCausalLM")
    with pytest.raises(ModelError, match=r"known are: bert, deepseek2, .*gemma2, gemma3, .*gemma4, .*llama, .*phi3"):
        family_of_gguf("mamba")


NOT_RUN = [family for family in FAMILIES if family.not_run is not None]


@pytest.mark.parametrize("family", NOT_RUN, ids=lambda family: family.name)
def test_a_family_that_is_only_planned_says_the_same_to_whoever_would_run_it(family: Family, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"sliding_window": 16}
    config = {**sizes, "vocab_size": 99, "model_type": family.name, "architectures": [*family.hf_architectures]}
    sentence = declared(config).not_run
    assert sentence == f"this engine does not run {family.name} models: {family.not_run}"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}; `twostroke plan` counts it by its config.json$"):
        load_checkpoint(tmp_path)
    for name in family.gguf_architectures:
        with pytest.raises(ModelError, match=re.escape(sentence)):
            family_of_gguf(name)


def test_what_is_refused_before_a_run_is_said_of_a_plan(configs: Configs) -> None:
    """The same reading, the same sentence; the sizes are counted all the same."""
    config = configs["llama_llama3"]
    assert declared(config) == Declared(read(config), None, is_assumed=False)
    for name, value in (
        ("mlp_bias", True),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 4.0}),
        ("quantization_config", {"quant_method": "bitnet"}),
        ("hidden_act", "relu"),
    ):
        spoilt = {**config, name: value}
        with pytest.raises(ModelError) as refused:
            read(spoilt)
        found = declared(spoilt)
        assert found.not_run == f"this engine does not run it: {refused.value}"
        assert (found.spec.num_layers, found.spec.layers[0].mlp.has_bias) == (3, name == "mlp_bias")
    inside = {"architectures": ["SeesForConditionalGeneration"], "text_config": config}
    assert declared(inside).not_run == (
        "this engine does not run it: the architecture 'SeesForConditionalGeneration' is not supported"
    )


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("llama", "its tokens see each other both ways .is_causal is false., and no modules.json says how"),
        ("deepseek_v3", "config.json: is_causal is False, which is not supported for this model's layers"),
        ("lfm2", "config.json: is_causal is False, which is not supported for this model's layers"),
        ("gpt_oss", "config.json: is_causal is False, which is not supported for this model's layers"),
        ("gemma3_vision", "config.json: is_causal is False beside text_config, and not in it"),
    ],
)
def test_tokens_that_see_both_ways_write_nothing(variant: str, sentence: str, tmp_path: Path) -> None:
    folder, _ = make_tiny(variant, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": True}))
    assert load_checkpoint(folder).spec.is_causal
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(ModelError, match=sentence):
        load_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": "no"}))
    with pytest.raises(ModelError, match="is_causal must be true or false, not 'no'"):
        load_checkpoint(folder)


def test_every_family_is_registered_once() -> None:
    names = [name for family in FAMILIES for name in (*family.hf_architectures, *family.gguf_architectures)]
    assert len(names) == len(set(names))
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", -64),
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 10**30),
        ("intermediate_size", 0),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("vocab_size", 2**40),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 10**400),
        ("tie_word_embeddings", "yes"),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("num_local_experts", 8),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"type": ["linear"], "factor": 4.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", "linear"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"]),
    ],
)
def test_spoilt_settings_are_named(configs: Configs, variant: str, name: str, value: object) -> None:
    config = {**configs[variant], name: value}
    if name == "rope_scaling":
        config.pop("rope_parameters")
    if value is None:
        config.pop(name)
    if value == ["chunked_attention"]:
        config["layer_types"] = value * config["num_hidden_layers"]
    named = "rope_type|type|factor|rope_scaling" if name == "rope_scaling" else name
    with pytest.raises(ModelError, match=rf"^config\.json: .*({named})"):
        read(config)


@pytest.mark.parametrize(
    ("variant", "name", "value"),
    [
        ("llama_llama3", "hidden_act", "gelu"),
        ("llama_llama3", "hidden_act", None),
        ("llama_llama3", "sliding_window", 16),
        ("llama_llama3", "head_dim", 17),
        ("llama_llama3", "partial_rotary_factor", 0.5),
        ("llama_llama3", "attn_logit_softcapping", 50.0),
        ("mistral", "attention_bias", True),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", "all"),
        ("qwen2_window", "sliding_window", None),
        ("qwen2_window", "use_sliding_window", False),
        ("qwen3", "attention_bias", "yes"),
        ("gemma2", "hidden_activation", "relu"),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "sliding_window", None),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "rope_parameters", {"rope_type": "default"}),
        ("gemma3", "rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
        ("gemma3", "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("llama_llama3", "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "decoder_sparse_step", 4),  # of three layers none has experts
        ("qwen3_moe", "mlp_only_layers", [-1]),
        ("qwen3_moe", "mlp_only_layers", [0, 1, 2]),
        ("qwen3_moe", "mlp_only_layers", "none"),
        ("qwen3_moe", "moe_intermediate_size", None),
        ("qwen3_moe", "num_local_experts", 10**6),
        ("qwen3_moe", "num_experts", 7),
        ("qwen3_moe", "num_experts_per_tok", 7),
        ("qwen3_moe", "norm_topk_prob", 1),
        ("mixtral", "num_local_experts", 0),
        ("mixtral", "num_experts_per_tok", 0),
        ("mixtral", "attention_bias", True),
        ("phi3_partial", "attention_bias", True),
        ("phi3_partial", "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("phi3_partial", "rope_parameters", {"partial_rotary_factor": 0.03}),
        ("gemma4", "use_bidirectional_attention", "all"),
        ("gemma4", "num_kv_shared_layers", 6),
        ("gemma4", "num_kv_shared_layers", 5),
        ("gemma4", "vocab_size_per_layer_input", 300),
        ("gemma4", "per_layer_config", {"0": {"head_dim": 64}}),
        ("gemma4", "per_layer_config", {"2": None, "5": None}),
        ("gemma4", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("gemma4_moe", "num_experts", None),
        ("gemma4_moe", "num_global_key_value_heads", "one"),
        ("minimax_m2", "attn_type_list", [1, 0, 1]),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "rotary_dim", 7),
        ("minimax_m2", "shared_intermediate_size", 64),
        ("granite", "residual_multiplier", 0),
        ("ernie4_5", "use_bias", True),
        ("hunyuan_dense", "use_cla", True),
        ("hunyuan_dense", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}),
        ("hunyuan_dense", "rope_parameters", {"rope_type": "dynamic", "alpha": 0}),
        ("hunyuan_dense", "rope_parameters", {"rope_type": "dynamic", "alpha": 9.0, "partial_rotary_factor": 0.5}),
        ("hunyuan_dense", "head_dim", 2),
        ("hunyuan_moe", "num_experts", None),
        ("hunyuan_moe", "moe_topk", [2, 1, 2]),
        ("hunyuan_moe", "moe_topk", 7),
        ("hunyuan_moe", "num_shared_expert", []),
        ("hunyuan_moe", "moe_layer_num_skipped", 1),
        ("hunyuan_moe", "norm_topk_prob", False),
    ],
)
def test_what_a_family_does_not_have_is_refused(configs: Configs, variant: str, name: str, value: object) -> None:
    read(configs[variant])  # it is this setting, and no other
    with pytest.raises(ModelError, match=r"^config\.json: "):
        read({**configs[variant], name: value})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_count", -1),
        ("block_count", 10**9),
        ("block_count", [3, 3]),
        ("embedding_length", 0),
        ("attention.head_count", 3.5),
        ("attention.head_count_kv", [2, 2, 2]),
        ("attention.head_count_kv", 3),
        ("attention.value_length", 64),
        ("attention.layer_norm_rms_epsilon", float("inf")),
        ("attention.causal", False),
        ("expert_count", 8),
        ("rope.scaling.type", "dynamic"),
        ("rope.dimension_count", 3),
        ("rope.dimension_count", 10**6),
        ("attention.sliding_window", -4),
        ("attention.clamp_kqv", 8.0),
        ("logit_scale", 0.5),
    ],
)
def test_spoilt_gguf_keys_are_named(files: dict[str, GGUFFile], variant: str, name: str, value: object) -> None:
    without_window = {"attention.sliding_window": 0} if variant == "qwen2_window" else {}
    read_gguf(files[variant], without_window)  # it is this key, and no other
    changes = {**without_window, name: value}
    with pytest.raises(ModelError, match=rf"^tiny\.gguf: \w+\.{name} "):
        read_gguf(files[variant], changes)


@pytest.mark.parametrize("variant", MOE_VARIANTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_count", -1),
        ("expert_count", 2**20),
        ("expert_used_count", 0),
        ("expert_used_count", 100),
        ("expert_feed_forward_length", 0),
        ("expert_shared_count", 1),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("expert_weights_norm", "yes"),
    ],
)
def test_spoilt_expert_keys_are_named(files: dict[str, GGUFFile], variant: str, name: str, value: object) -> None:
    assert read_gguf(files[variant], {}).moe is not None
    with pytest.raises(ModelError, match=rf"^tiny\.gguf: \w+\.{name} "):
        read_gguf(files[variant], {name: value})


def test_experts_and_layers_together_are_limited(configs: Configs) -> None:
    """Each expert of each layer is three tensors to list."""
    with pytest.raises(ModelError, match="num_local_experts is 4000, too many for 1000 layers"):
        read({**configs["mixtral"], "num_local_experts": 4000, "num_hidden_layers": 1000})


def test_a_qwen_window_in_gguf_is_refused_because_its_layers_are_unknown(files: dict[str, GGUFFile]) -> None:
    with pytest.raises(ModelError, match="sliding_window is 16, which is not supported"):
        read_gguf(files["qwen2_window"], {})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
FUZZ = examples(150, allowed=(HealthCheck.function_scoped_fixture,))


@FUZZ
@given(data=st.data())
def test_any_config_is_a_sound_spec_or_a_model_error(configs: Configs, data: st.DataObject) -> None:
    config = dict(configs[data.draw(st.sampled_from((*VARIANTS, *MOE_VARIANTS, *NEWER)))])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        if name != "architectures":
            config[name] = data.draw(JSON_VALUES)
    if isinstance(config.get("rope_parameters"), dict) and data.draw(st.booleans()):
        ropes = dict(config["rope_parameters"])
        if ropes:
            ropes[data.draw(st.sampled_from(sorted(ropes)))] = data.draw(JSON_VALUES)
        config["rope_parameters"] = ropes
    try:
        spec = read(config)
    except ModelError as error:
        assert len(str(error)) < 300
    else:
        check_sound(spec)


@FUZZ
@given(data=st.data())
def test_any_gguf_metadata_is_a_sound_spec_or_a_model_error(files: dict[str, GGUFFile], data: st.DataObject) -> None:
    file = files[data.draw(st.sampled_from((*VARIANTS, *MOE_VARIANTS, *NEWER)))]
    keys = sorted(key.partition(".")[2] for key in file.metadata if not key.startswith("general."))
    names = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3))
    try:
        spec = read_gguf(file, {name: data.draw(JSON_VALUES) for name in names})
    except ModelError as error:
        assert len(str(error)) < 300
    else:
        check_sound(spec)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            {"quant_method": "bitnet"},
            "quant_method is 'bitnet', which is not supported: take the model's plain weights",
        ),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, which is not read; 4 and 8 are"),
        ({"load_in_8bit": True}, "quant_method is missing"),
        ("gptq", "must be an object, not 'gptq'"),
    ],
)
@pytest.mark.parametrize("variant", ["llama_llama3", "gemma3"])
def test_the_method_of_a_quantised_folder_is_named(
    configs: Configs, variant: str, setting: object, sentence: str
) -> None:
    nested = {"architectures": configs[variant]["architectures"], "text_config": configs[variant]}
    shapes = [configs[variant]] if variant != "gemma3" else [configs[variant], nested]
    for config in shapes:
        with pytest.raises(ModelError, match=f"quantization_config.*{sentence}"):
            read({**config, "quantization_config": setting})


def test_a_long_value_is_not_shown_whole(configs: Configs) -> None:
    with pytest.raises(ModelError) as caught:
        read({**configs["qwen3"], "hidden_act": "x" * 100_000})
    assert len(str(caught.value)) < 300
