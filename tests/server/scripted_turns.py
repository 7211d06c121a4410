"""A model of gpt-oss's manner that knows its turns: a real checkpoint, run by the real engine, that writes on from the
last tokens as its script has it. Each of its heads looks a fixed number of tokens back; the last matrix is solved for
the script. The hotter it is drawn, the more often another word of its language comes, so that it writes messages that
are broken in every way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.text.agent_templates import GPT_OSS

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
RETURN, CALL, CONSTRAIN = "<|return|>", "<|call|>", "<|constrain|>"
CONTROL_TOKENS = [START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN]
NEXT = [END, START, "assistant", CHANNEL]
"""Between one message of an answer and the text of the next one's channel."""
THOUGHT, AFTER_THOUGHT = "The user wants a roll.", "It came to four."
PREAMBLE, ANSWER = "I will roll.", "A four."
FINAL_WORDS = ["A", " four."]


def _calls(name: str, *arguments: str) -> list[str]:
    return ["commentary", " to=functions.", name, " ", CONSTRAIN, "json", MESSAGE, *arguments]


ROLL, SAY = _calls("roll_dice", '{"sides":', " 6}"), _calls("say", '{"words":', ' ["yes"]}')
LOOK = _calls("look", "{}")
PONDER = [CHANNEL, "analysis", MESSAGE, "The user", " wants", " a roll."]
SCRIPT = [
    ("Roll a die.", [*PONDER, *NEXT, *ROLL, CALL]),
    ("Roll on.", [*PONDER[:3], "A word first.", *NEXT, "commentary", MESSAGE, "I will", " roll.", *NEXT, *ROLL, CALL]),
    ("Look and roll.", [*PONDER[:3], "Both, then.", *NEXT, *LOOK, *NEXT, *ROLL, CALL]),
    ("Hello.", [*PONDER[:3], "A greeting.", *NEXT, "final", MESSAGE, "Well", " met.", RETURN]),
    ('"5"', [*PONDER[:3], "Not yet.", *NEXT, *SAY, CALL]),
    ('"4"', [*PONDER[:3], "It came", " to four.", *NEXT, "final", MESSAGE, *FINAL_WORDS, RETURN]),
]
"""The last words of a prompt, and what is answered. Those in quotes are results."""
ROLES = [
    "user",
    "assistant",
    "analysis",
    "commentary",
    "final",
    "json",
    "functions.",
    " to=assistant",
    " to=functions.",
]
NUM_LAGS = 6
"""From the text of an answer's first message back to the words of its prompt."""
HEAD_DIM, WORDS_DIM = 128, 384
"""As many tokens a head can tell apart, and as many the vocabulary has at most."""
HIDDEN = WORDS_DIM + NUM_LAGS * HEAD_DIM
SHARPNESS = 400.0
"""Of a head's look at its one token."""
CERTAINTY = 12.0
"""How far a script's next token is ahead of another word of the language, in logits at temperature 1; and that of any
other token."""
ROPE_THETA = 100.0


def make_scripted_turns(folder: Path) -> Path:
    words = dict.fromkeys([*ROLES, *(word for prompt, answer in SCRIPT for word in (prompt, *answer))])
    tokenizer = _tokenizer([word for word in words if word not in CONTROL_TOKENS and word != " "])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": RETURN}))
    ends = [tokenizer.token_to_id(RETURN), tokenizer.token_to_id(CALL)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(GPT_OSS)
    language = [_id_of(tokenizer, word) for word in [*CONTROL_TOKENS, *words]]
    language = list(dict.fromkeys(language))
    assert len(language) <= HEAD_DIM and tokenizer.get_vocab_size() <= WORDS_DIM
    contexts = [[_id_of(tokenizer, word) for word in words] for words in _contexts()]
    _save(folder, tokenizer.get_vocab_size(), language, contexts)
    return folder


def _contexts() -> list[list[str]]:
    """Each token of an answer, behind those before it."""
    found: list[list[str]] = []
    for prompt, answer in SCRIPT:
        is_result = prompt.startswith('"')
        before = [CHANNEL, "commentary", MESSAGE, prompt] if is_result else [START, "user", MESSAGE, prompt]
        row = [*before, END, START, "assistant", *answer]
        places = range(len(row) - len(answer), len(row))
        found += [row[max(0, place - NUM_LAGS - 1) : place + 1] for place in places]
    return found


def _id_of(tokenizer: Tokenizer, word: str) -> int:
    return int(tokenizer.token_to_id("\u0120" if word == " " else word))


def _tokenizer(words: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL_TOKENS)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def _save(folder: Path, vocab_size: int, language: list[int], contexts: list[list[int]]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_LAGS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        "mlp.gate_proj": np.zeros((64, HIDDEN), np.float32),
        "mlp.up_proj": np.zeros((64, HIDDEN), np.float32),
        "mlp.down_proj": np.zeros((HIDDEN, 64), np.float32),
        **_looking_back(language),
    }
    weights = {f"model.layers.0.{name}.weight": matrix for name, matrix in weights.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        weights[f"{name}.weight"] = np.ones(HIDDEN, np.float32)
    weights["model.embed_tokens.weight"] = np.eye(vocab_size, HIDDEN, dtype=np.float32)
    weights["lm_head.weight"] = _written_next(vocab_size, language, contexts)
    save_file(weights, folder / "model.safetensors")


def _looking_back(language: list[int]) -> dict[str, np.ndarray]:
    """Head `lag - 1` finds the token `lag` places back, and writes into dimensions of its own which one that is. All
    keys are alike; rope alone tells places apart, and each query is turned back by its lag."""
    ones = np.ones(HIDDEN, np.float32) / np.sqrt(HIDDEN, dtype=np.float32)  # times a normed token: one
    pairs = HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-np.arange(pairs) / pairs)
    strength = np.sqrt(SHARPNESS * np.sqrt(HEAD_DIM) / pairs)
    key = np.concatenate([np.ones(pairs), np.zeros(pairs)]) * strength
    queries, outputs = [], np.zeros((HIDDEN, NUM_LAGS * HEAD_DIM), np.float32)
    for lag in range(1, NUM_LAGS + 1):
        angles = -lag * frequencies
        queries.append(np.concatenate([np.cos(angles), np.sin(angles)]) * strength)
        start = (lag - 1) * HEAD_DIM
        outputs[WORDS_DIM + start : WORDS_DIM + start + HEAD_DIM, start : start + HEAD_DIM] = np.eye(HEAD_DIM)
    values = np.zeros((HEAD_DIM, HIDDEN), np.float32)
    values[range(len(language)), language] = 1 / np.sqrt(HIDDEN)
    return {
        "self_attn.q_proj": np.outer(np.concatenate(queries), ones).astype(np.float32),
        "self_attn.k_proj": np.outer(key, ones).astype(np.float32),
        "self_attn.v_proj": values,
        "self_attn.o_proj": outputs,
    }


def _written_next(vocab_size: int, language: list[int], contexts: list[list[int]]) -> np.ndarray:
    """The last matrix: exact for every place of the script."""
    place = {token: index for index, token in enumerate(language)}
    seen, wanted = np.zeros((len(contexts), HIDDEN)), np.zeros((len(contexts), vocab_size))
    for row, (*before, following) in enumerate(contexts):
        seen[row, before[-1]] = 1.0
        for lag, token in enumerate(reversed(before[:-1]), 1):
            seen[row, WORDS_DIM + (lag - 1) * HEAD_DIM + place[token]] = 1.0
        seen[row] *= np.sqrt(HIDDEN / seen[row].sum())  # as the last norm has it
        wanted[row, following] = CERTAINTY
    wanted[:, language] += CERTAINTY
    solved, *_ = np.linalg.lstsq(seen, wanted, rcond=None)
    assert np.abs(seen @ solved - wanted).max() < 1e-6, "two places of the script look alike"
    return np.ascontiguousarray(solved.T, np.float32)
