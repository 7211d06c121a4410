"""lm-eval: a task of two questions from a local file, by how likely its answers are and by writing, with the
tokenizer that the server has."""

import json
import os
from pathlib import Path

from given import API_KEY, finish, part, shell

QUESTIONS = [
    {"question": "The capital of France is", "answers": [" Paris", " Lima"], "right": 0},
    {"question": "One, two, three, four,", "answers": [" banana", " five"], "right": 1},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: question
metadata: {version: 1}
"""
CHOOSE = """task: choose
output_type: multiple_choice
doc_to_choice: answers
doc_to_target: right
"""
WRITE = """task: write
output_type: generate_until
doc_to_target: "{{answers[right]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""

os.environ.update(OPENAI_API_KEY=API_KEY, HF_DATASETS_OFFLINE="1")
tasks = Path("tasks")
tasks.mkdir()
Path("questions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in QUESTIONS), encoding="utf-8")
for name, own in (("choose", CHOOSE), ("write", WRITE)):
    (tasks / f"{name}.yaml").write_text(own + COMMON % Path("questions.jsonl").resolve(), encoding="utf-8")


def figures(folder: str) -> dict[str, dict[str, float]]:
    (found,) = Path(folder).rglob("results_*.json")
    return dict(json.loads(found.read_text(encoding="utf-8"))["results"])


with part("multiple choice by likelihood, and writing, with the server's tokenizer"):
    command = """
    # shown: sh
    export OPENAI_API_KEY=$API_KEY
    lm_eval run --model local-completions --tasks choose,write --include_path tasks --output_path scores \
      --model_args model=$MODEL,base_url=$BASE_URL/completions,tokenizer_backend=remote,auth_token=$API_KEY
    # end
    """
    shell(command)
    scores = figures("scores")
    assert scores["choose"]["acc,none"] == 1.0
    assert "exact_match,none" in scores["write"]

with part("writing by chat"):
    shell(
        "lm_eval run --model local-chat-completions --apply_chat_template --tasks write --include_path tasks "
        "--output_path chat --model_args model=$MODEL,base_url=$BASE_URL/chat/completions,num_concurrent=2"
    )
    assert "exact_match,none" in figures("chat")["write"]

finish()
