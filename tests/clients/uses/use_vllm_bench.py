"""`vllm bench serve`: four random prompts, and its own report of them."""

import json
from pathlib import Path

from given import finish, part, shell

with part("load of four random prompts, and its report"):
    command = """
    # shown: sh
    export OPENAI_API_KEY=$API_KEY
    vllm bench serve --base-url $ADDRESS --model $MODEL --tokenizer $TOKENIZER \
      --dataset-name random --random-input-len 32 --random-output-len 16 \
      --num-prompts 4 --save-result --result-filename report.json
    # end
    """
    shell(command)
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert report["completed"] == 4 and report["total_output_tokens"] == 64

finish()
