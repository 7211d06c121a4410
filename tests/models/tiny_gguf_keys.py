"""The settings of a tiny transformers model, by the keys that llama.cpp's converter gives them."""

from __future__ import annotations

from typing import Any

from tests.models.tiny_gguf_nemotron import nemotron_keys

from twostroke.models.families.rope import longrope_attention_factor

GEMMA4 = ("gemma4_text", "gemma4_unified_text")


def _latent_keys(config: Any) -> dict[str, Any]:
    """DeepSeek's, in the older manner; the later one is `later_latent_keys` over it."""
    keys = {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": _leading_dense(config),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }
    if "mscale_all_dim" in config.rope_parameters:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.model_type != "deepseek_v2":
        keys["expert_weights_norm"] = True
    if config.n_group is not None:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.model_type == "deepseek_v3":  # GLM-4.7-Flash's config does not say it, nor do its files
        keys["expert_gating_func"] = 2
    return keys


def _leading_dense(config: Any) -> int:
    kinds = getattr(config, "mlp_layer_types", None)
    return config.first_k_dense_replace if kinds is None else kinds.index("sparse")


def _mistral_keys(config: Any) -> dict[str, Any]:
    """Of Ministral 3."""
    ropes = config.rope_parameters
    keys = {"attention.temperature_scale": ropes["llama_4_scaling_beta"]}
    return keys | {"rope.scaling.yarn_log_multiplier": ropes["mscale_all_dim"]}


def _glm_keys(config: Any) -> dict[str, Any]:
    """Of GLM-4.5, and of dots.llm1 but for the kind of scores."""
    return {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def later_latent_keys(config: Any) -> dict[str, Any]:
    """As files since 2025 have it: one KV head, whose key is what is kept of a token."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
    }


def _delta_net_keys(config: Any) -> dict[str, Any]:
    keys = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 1 + config.layer_types.index("full_attention"),
    }
    if getattr(config, "num_experts", None):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return keys


def _granite_keys(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    return {
        "attention.head_count_kv": heads,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "embedding_scale": config.embedding_multiplier,
        "attention.scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "expert_shared_feed_forward_length": config.shared_intermediate_size if config.num_local_experts else None,
    }


def _convolution_keys(config: Any) -> dict[str, Any]:
    """LFM2's: KV heads layer by layer, and the width of the MLP as it is."""
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    keys = {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache}
    keys["attention.layer_norm_rms_epsilon"] = config.norm_eps
    if config.model_type == "lfm2":
        unit = config.block_multiple_of
        keys["feed_forward_length"] = (int(2 * config.intermediate_size / 3) + unit - 1) // unit * unit
    else:
        keys |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    return keys


def model_keys(config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ropes = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    ropes = ropes.get("full_attention", ropes)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": ropes["rope_theta"],
        "rope.dimension_count": int(head_dim * ropes.get("partial_rotary_factor", 1.0)),
    }
    if getattr(config, "num_local_experts", None):
        keys |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    if getattr(config, "moe_intermediate_size", None):
        keys["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "glm4_moe":
        keys |= _glm_keys(config)
    if config.model_type == "dots1":
        keys |= {name: value for name, value in _glm_keys(config).items() if name != "expert_gating_func"}
    if config.model_type == "ministral3":
        keys |= _mistral_keys(config)
    if config.model_type == "minimax_m2":
        keys |= {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
    if config.model_type in GEMMA4:
        keys |= _gemma4_keys(config)
    if config.model_type == "ernie4_5_moe":
        keys |= {"expert_count": config.moe_num_experts, "expert_used_count": config.moe_k}
        keys |= {"leading_dense_block_count": config.moe_layer_start_index}
        keys["expert_shared_count"] = config.moe_num_shared_experts
    if config.model_type == "hunyuan_v1_moe":
        widths = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
        keys |= {**dict.fromkeys(widths, config.intermediate_size), "expert_shared_count": 1}
    if config.model_type == "granitemoeshared":
        keys["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if config.model_type in ("granite", "granitemoe", "granitemoeshared"):
        keys |= {"embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier}
        keys |= {"attention.scale": config.attention_multiplier, "logit_scale": config.logits_scaling}
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if ropes["rope_type"] == "dynamic":  # Hunyuan's, worked out by the converter
        keys |= {"rope.freq_base": ropes["rope_theta"] * ropes["alpha"] ** (head_dim / (head_dim - 2))}
        keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if ropes["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": ropes["factor"]}
        keys["rope.scaling.original_context_length"] = ropes["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{name}": ropes[name] for name in ("beta_fast", "beta_slow")}
    if hasattr(config, "linear_num_key_heads"):
        keys |= _delta_net_keys(config)
    if config.model_type == "granitemoehybrid":
        keys |= _granite_keys(config)
    if config.model_type == "nemotron_h":
        keys |= nemotron_keys(config)
    if hasattr(config, "conv_L_cache"):
        keys |= _convolution_keys(config)
    if getattr(config, "kv_lora_rank", None):
        keys |= _latent_keys(config)
    if ropes["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": ropes["factor"]}
    if ropes["rope_type"] == "longrope":
        original = ropes["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
        stretch = config.max_position_embeddings / original
        keys["rope.scaling.attn_factor"] = longrope_attention_factor(stretch, original)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            keys[cap] = getattr(config, cap)
    return keys


def _gemma4_keys(config: Any) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    by_layer = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    whole_dim, local_dim = by_layer[-1].head_dim, config.head_dim
    num_sharing = getattr(config, "num_kv_shared_layers", 0)
    first_sharing = config.num_hidden_layers - num_sharing
    keys = {
        "attention.shared_kv_layers": num_sharing,
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0),
        "attention.sliding_window_pattern": slides,
        "attention.key_length": whole_dim,
        "attention.value_length": whole_dim,
        "attention.key_length_swa": local_dim,
        "attention.value_length_swa": local_dim,
        "rope.dimension_count": whole_dim,
        "rope.dimension_count_swa": local_dim,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    if getattr(config, "use_double_wide_mlp", False):
        width = config.intermediate_size
        keys["feed_forward_length"] = [width * (1 + (layer >= first_sharing)) for layer in range(len(slides))]
    if config.attention_k_eq_v:
        keys["attention.head_count_kv"] = [layer.num_key_value_heads for layer in by_layer]
    if getattr(config, "enable_moe_block", False):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.top_k_experts}
    return keys
