"""guidellm: six requests from two users, and its own report of them."""

import json
from pathlib import Path

from given import finish, part, shell

with part("load from two users, and its report"):
    command = """
    # shown: sh
    guidellm run --backend kind=openai_http,target=$ADDRESS,model=$MODEL,api_key=$API_KEY \
      --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6 \
      --tokenizer kind=huggingface_auto,model=$TOKENIZER \
      --data kind=synthetic_text,prompt_tokens=32,output_tokens=16 --output kind=json,path=report.json
    # end
    """
    shell(command)
    report = json.loads(Path("report.json").read_text(encoding="utf-8"))
    (benchmark,) = report["benchmarks"]
    counted = benchmark["metrics"]["request_totals"]
    assert counted["successful"] == counted["total"] == 6, counted

finish()
