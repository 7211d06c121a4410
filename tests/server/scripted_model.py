"""A model that knows its lines: a real checkpoint, run by the real engine, whose weights say which token follows which.
Where a grammar forbids the next of its lines, all that it allows is equally likely. Its template tells it which line to
begin with, by the last message."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN = 512
END = "<|end|>"
CONTROL_TOKENS = [END, "<|turn|>", "<|answer|>", "<|call|>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]
OWN_TOKENS = {
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>"],
}
"""Control tokens of one format alone: some are known by them."""
HARMONY_THOUGHT = ["<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "Let me", " see.", END]
HARMONY_ANSWER = [END, "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
"""As likely as another thought."""
THOUGHT = ["<think>", "Let me", " see.", "</think>", "\n\n", "Well, ", "well.", END]
HOLES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
FILLED = ["<|fim_middle|>", "return", " a + b", "<|fim_pad|>", "and more"]
HERMES_CALL = ["<tool_call>", '\n{"name": "roll_dice", "arguments": ', '{"sides":', " 6}", "}\n", "</tool_call>"]
LLAMA3_CALL = ["<|python_tag|>", '{"name": "roll_dice", "parameters": ', '{"sides": ', "6}", "} "]
MISTRAL_CALL = ["[TOOL_CALLS]", '[{"name": "roll_dice", "arguments": ', '{"sides" : ', "6 }", "}]"]
MISTRAL_ARGS_CALL = ["[TOOL_CALLS]", "roll_dice", "[CALL_ID]", "AbCd12345", "[ARGS]", '{"sides" : ', "6 }"]
GEMMA4_CALL = ["<|tool_call>", "call:", "roll_dice", "{sides:", "6}", "<tool_call|>"]
MINIMAX_CALL = ["<minimax:tool_call>", '\n<invoke name="', 'roll_dice">', '\n<parameter name="sides">', "6", "</para"]
MINIMAX_CALL += ["meter>\n</invoke>\n", "</minimax:tool_call>"]

TEMPLATES = {
    "gemma4": """
{%- macro argument(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is boolean %}{{ "true" if value else "false" }}
{%- elif value is mapping %}{ {%- for key, inner in value | dictsort %}{{ key }}:{{ argument(inner) }}
{%- if not loop.last %},{% endif %}{% endfor -%} }
{%- elif value is sequence %}[{% for inner in value %}{{ argument(inner) }}{% if not loop.last %},{% endif %}
{%- endfor %}]
{%- else %}{{ value }}{% endif %}{% endmacro %}
{%- for message in messages %}<|turn|>{{ message.role }}
{% if tools and loop.first %}{{ tools | tojson }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is not mapping %}{{ raise_exception("Arguments are an object.") }}{% endif %}
{{- "<|tool_call>call:" + call.function.name + "{" }}
{%- for key, value in call.function.arguments | dictsort %}{{ key }}:{{ argument(value) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ "}<tool_call|>" }}{% endfor %}
{{- message.content or "" }}<|end|>{% endfor %}<|turn|>model
<|call|>""",
    "minimax": """
{%- for message in messages %}<|turn|>{{ message.role }}
{% if tools and loop.first %}{{ tools | tojson }}{% endif %}
{%- if message.tool_calls %}<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">
{{- value | tojson if value is not string else value }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}
{{- message.content or "" }}<|end|>{% endfor %}<|turn|>ai
<|call|>""",
    "harmony": """
{%- for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor -%}
<|start|>assistant{% if has_opened %}<|channel|>final<|message|>{% endif %}""",
    "hermes": """
{%- if tools %}<|turn|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|turn|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content + "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}<|turn|>assistant
{% if "Roll" in messages[-1].content %}<|call|>
{%- elif enable_thinking is defined and not enable_thinking %}<|answer|><think></think>{{ "\n\n" }}
{%- elif "Ponder" in messages[-1].content %}<|answer|><think>
{% else %}<|answer|>{% endif %}""",
    "llama3": """
{%- for message in messages %}<|turn|>{{ message.role }}
{% if tools and loop.last %}Answer with {"name": ..., "parameters": ...} to call one of these.
{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("This model calls one tool at a time.") }}{% endif %}
{%- if message.content is not none %}{{ raise_exception("A call has no content.") }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ message.content }}{% endif %}<|end|>
{%- endfor %}<|turn|>assistant
<|call|>""",
    "mistral": """
{%- for message in messages %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("A call's id has nine characters.") }}{% endif %}
{{- dict(call.function, id=call.id) | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]<|end|>
{%- elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("A call's id has nine characters.") }}{% endif %}
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}[INST] {{ message.content }}[/INST]{% endif %}
{%- endfor %}<|call|>""",
    "mistral-args": """
{%- for message in messages %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("A call's id has nine characters.") }}{% endif %}
{{- "[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + call.id + "[ARGS]" + call.function.arguments | tojson }}
{%- endfor %}<|end|>
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}<|call|>""",
}
"""In the manner of the formats' own: each renders tools, calls and results, and refuses what theirs refuse."""
CALLS = {
    "hermes": [*HERMES_CALL, "\nDone.", END],
    "llama3": [*LLAMA3_CALL, END],
    "mistral": [*MISTRAL_CALL, END],
    "mistral-args": [*MISTRAL_ARGS_CALL, END],
    "gemma4": [*GEMMA4_CALL, END],
    "minimax": [*MINIMAX_CALL, END],
}


def make_scripted(folder: Path, tool_format: str) -> Path:
    """`harmony` thinks, and knows no call."""
    lines = [["<|call|>", *CALLS[tool_format]]] if tool_format in CALLS else [HARMONY_THOUGHT, HARMONY_ANSWER]
    if tool_format == "hermes":
        lines += [["<|answer|>", *THOUGHT], FILLED]
    tokenizer = _tokenizer(lines, [*CONTROL_TOKENS, *OWN_TOKENS.get(tool_format, []), *HOLES])
    size = tokenizer.get_vocab_size()
    assert size <= HIDDEN
    follows = np.zeros((size, HIDDEN), np.float32)  # [next token, this token]
    for line in lines:
        for this, following in pairwise(line):
            follows[tokenizer.token_to_id(following), tokenizer.token_to_id(this)] = 1.0
    if tool_format == "hermes":  # a thought that the template opens begins on a new line
        newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        follows[tokenizer.token_to_id("Let me"), newline] = 1.0
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": END if tool_format in CALLS else "<|return|>"})
    )
    (folder / "chat_template.jinja").write_text(TEMPLATES[tool_format])
    _save_weights(folder, follows)
    return folder


def _tokenizer(lines: list[list[str]], control_tokens: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control_tokens)
    words = dict.fromkeys(word for line in lines for word in line if word not in control_tokens)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def _save_weights(folder: Path, follows: np.ndarray) -> None:
    size, kv_dim, inner_dim = len(follows), 64, 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": inner_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // 64,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    zeros = {  # the layer adds nothing: a token's embedding alone decides what follows it
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv_dim, HIDDEN),
        "self_attn.v_proj": (kv_dim, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (inner_dim, HIDDEN),
        "mlp.up_proj": (inner_dim, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner_dim),
    }
    weights = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.embed_tokens.weight"] = np.eye(size, HIDDEN, dtype=np.float32)
    weights["lm_head.weight"] = follows
    save_file(weights, folder / "model.safetensors")
