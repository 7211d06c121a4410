"""aiperf: six streamed requests, two at a time, and its own report of them."""

import json
import os
from pathlib import Path

from given import finish, part, shell

# Told to be offline, it looks for a folder's tokenizer in the Hub's cache; it needs no network otherwise.
os.environ.pop("HF_HUB_OFFLINE", None)

with part("load of two at a time, and its report"):
    command = """
    # shown: sh
    aiperf profile --model $MODEL --url $ADDRESS --api-key $API_KEY --endpoint-type chat --streaming \
      --tokenizer $TOKENIZER --concurrency 2 --request-count 6 --ui none \
      --isl 32 --osl 16 --output-artifact-dir report
    # end
    """
    shell(command)
    report = json.loads(Path("report/profile_export_aiperf.json").read_text(encoding="utf-8"))
    assert report["request_count"]["avg"] == 6 and report["total_output_tokens"]["avg"] == 96, report

finish()
