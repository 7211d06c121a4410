"""What importing the package costs, and the tidiness of its tree."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import twostroke

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = sorted((SOURCE / "twostroke").rglob("*.py"))
HEAVY = ("numpy", "llvmlite", "tokenizers", "jinja2", "huggingface_hub", "typer", "rich", "torch", "transformers")
MAX_IMPORT_S = 0.3
MAX_LINES = 400

PROBE = """
import json, sys, time
started_s = time.perf_counter()
import twostroke
taken_s = time.perf_counter() - started_s
print(json.dumps({"taken_s": taken_s, "modules": sorted(sys.modules), "file": twostroke.__file__}))
"""


def fresh_import():
    """Import twostroke in an interpreter of its own."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROBE]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(finished.stdout)


def test_importing_twostroke_is_quick_and_imports_nothing_heavy():
    imports = [fresh_import() for _ in range(3)]
    assert Path(imports[0]["file"]).is_relative_to(SOURCE)
    assert min(report["taken_s"] for report in imports) < MAX_IMPORT_S  # the best of three: the machine may be busy
    roots = {name.split(".")[0] for name in imports[0]["modules"]}
    assert roots.isdisjoint(HEAVY)


def test_every_public_name_is_listed_and_is_there():
    assert {"LLM", "SamplingParams", "TokenEvent", "GrammarSpec", "PrefillProgress"} <= set(twostroke.__all__)
    assert set(twostroke.__all__) <= set(dir(twostroke))
    for name in twostroke.__all__:
        assert getattr(twostroke, name) is not None


def test_listing_the_names_loads_nothing():
    program = "import sys, twostroke; names = dir(twostroke); sys.exit('LLM' not in names or 'numpy' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_is_short_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "a module opens with what it knows and what it does not"
    assert not re.search(r"\bso many\b", text, re.IGNORECASE), "a number is named, or is `this many`"
