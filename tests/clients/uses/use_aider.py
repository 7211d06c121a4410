"""aider: a question about a file of a git repository, streamed. An edit is more than the small model can do."""

import re
from pathlib import Path

from given import finish, part, shell

Path("hello.py").write_text('print("Hello!")\n', encoding="utf-8")
author = "-c user.name=nobody -c user.email=nobody@example.org"
shell(f"git init -q . && git add . && git {author} commit -q -m 'A greeting'")

with part("question about a file"):
    command = """
    # shown: sh
    export OPENAI_API_BASE=$BASE_URL OPENAI_API_KEY=$API_KEY
    aider --model openai/$MODEL --no-show-model-warnings --chat-mode ask --message 'What does this print?' hello.py
    # end
    """
    quiet = (
        "export AIDER_ANALYTICS=false AIDER_CHECK_UPDATE=false AIDER_GITIGNORE=false AIDER_SHOW_RELEASE_NOTES=false\n"
    )
    counted = re.search(r"Tokens: (\S+) sent, (\d+) received", shell(quiet + command))
    assert counted and int(counted[2]) > 0

finish()
