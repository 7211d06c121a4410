"""aiperf: six streamed requests, two at a time, and its own report of them."""

import json
from pathlib import Path

from given import finish, part, shell

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
    print(json.dumps(report)[:6000])

finish()
