"""llm, the command: a server added by a line of YAML, a prompt, a schema, and a conversation that goes on."""

import json
import os
from pathlib import Path

from given import finish, part, shell

os.environ["LLM_USER_PATH"] = str(Path.cwd())

with part("prompt"):
    command = """
    # shown: sh
    cat > "$(dirname "$(llm logs path)")/extra-openai-models.yaml" <<END
    - {model_id: here, model_name: $MODEL, api_base: "$BASE_URL", api_key_name: here, supports_schema: true}
    END
    llm keys set here --value $API_KEY
    llm -m here -o max_tokens 40 'Name three colours of the rainbow.'
    # end
    """
    assert shell(command).strip()

with part("schema"):
    told = shell("llm -m here -o max_tokens 200 -o temperature 0 --schema 'likes_fish bool' 'Tom is a cat.'")
    assert isinstance(json.loads(told)["likes_fish"], bool)

with part("conversation, not streamed"):
    assert shell("llm -c --no-stream -o max_tokens 20 'And two more?'").strip()

finish()
