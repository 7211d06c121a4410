"""The arrows of the design, held by reading every module's imports, wherever in the file they stand."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "twostroke"
MODULES = {
    ".".join(("twostroke", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


@dataclass(frozen=True)
class Room:
    rooms: frozenset[str]
    """Other rooms it may import."""
    packages: frozenset[str] = frozenset()
    """Third-party packages it may import, beside the standard library."""


def room(rooms="", packages=""):
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


BELOW_ENGINE = "core kv cost speculation explain scheduling models text backends config machine cache"
SPEC_PARTS = ("mlp", "attention", "layer_input", "recurrent")
ROOMS = {
    "__main__": room("cli"),
    "core": room(),
    "machine": room(),
    "cache": room("core"),
    "config": room("core machine"),
    "kv": room("core"),
    "cost": room("core models.spec models.families"),
    "explain": room("core cost"),
    "scheduling": room("core kv cost"),
    "models": room("core cache", "numpy huggingface_hub"),
    # Declarations alone: whoever plans reads them, and loads nothing.
    "models.spec": room(f"core models.rope_spec {' '.join(f'models.{part}_spec' for part in SPEC_PARTS)}"),
    "models.rope_spec": room(),
    "models.mlp_spec": room(),
    "models.attention_spec": room("models.rope_spec models.mlp_spec"),
    "models.layer_input_spec": room("models.mlp_spec"),
    "models.recurrent_spec": room("models.mlp_spec"),
    "models.features": room("models.spec models.rope_spec"),
    "models.families": room("core models.spec models.rope_spec models.quantised"),
    "models.quantised": room("core models.families"),
    "speculation": room("core cost", "numpy"),
    "text": room("core", "tokenizers jinja2 llguidance"),
    "backends": room("core cost speculation models cache machine", "numpy"),
    "backends.cpu": room("core cost speculation models cache machine", "numpy llvmlite"),
    "backends.cuda": room("core cost speculation models cache machine", "numpy torch triton"),
    "engine": room(f"{BELOW_ENGINE} cluster.transfer", "rich"),
    "lab": room("core cost config machine models backends engine", "matplotlib"),
    "web": room("core"),
    "cluster": room("core kv", "zmq msgspec"),
    "cluster.transfer": room("core", "numpy"),
    # How many replicas a load asks for, and what is done about it: arithmetic over signals.
    "cluster.demand": room("core"),
    "cluster.autoscale": room("cluster.demand"),
    # What extras bring, each in one place.
    "cluster.deploy": room("core", "ray"),
    # Whether several cards may hold one copy, as a server asks it when it starts.
    "cluster.deployment_file": room("core backends"),
    "cluster.smg_child": room("core", "smg"),
    "server": room(
        "core cost explain text config engine planner web cluster",
        "fastapi starlette pydantic pydantic_core uvicorn h11 uvloop msgspec zmq prometheus_client opentelemetry",
    ),
    "planner": room("core kv cost scheduling models.spec models.features models.families cluster.demand", "matplotlib"),
    # From names to deployments: it looks at files and at this machine.
    "planner.asked": room("core kv cost models backends config machine engine"),
    "training": room("core config machine models speculation engine", "numpy torch"),
    "cli": room(f"{BELOW_ENGINE} engine lab server planner training web cluster", "typer rich"),
}
DECLARATIONS = {
    "models.spec",
    "models.rope_spec",
    "models.mlp_spec",
    "models.attention_spec",
    "models.layer_input_spec",
    "models.recurrent_spec",
    "models.features",
    "models.families",
    "models.quantised",
}
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
SHARED_BACKEND_PARTS = ("twostroke.backends.interface", "twostroke.backends.host")
# Whoever chooses or loads a concrete part; inside the engine that is build.py alone.
CHOOSERS = ("twostroke.models.loading", "twostroke.models.resolve", "twostroke.text.loading")


def imports_of(source, module, is_package=False):
    """Every module that a source imports, by full name; names taken from a twostroke package count as modules where
    they are modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, base]).rstrip(".")
            found |= {name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return found


def room_of(module):
    """The longest entry of ROOMS that a twostroke module lies in; None for the package itself."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS), None)


def faults(module, imported):
    """What is wrong with a module's imports, a sentence each."""
    own = room_of(module)
    if own is None:
        return [f"{module} lies in no room that the layering test knows"]
    allowed = ROOMS[own]
    found = []
    for name in sorted(imported):
        root = name.split(".")[0]
        if root in UNSAFE:
            found.append(f"{module} imports {name}: no pickle, anywhere")
        elif root == "twostroke":
            found.extend(_internal_faults(module, own, allowed, name))
        elif root not in sys.stdlib_module_names and root not in allowed.packages:
            found.append(f"{module} imports {name}: {own} may import {sorted(allowed.packages) or 'no package'}")
    return found


def _internal_faults(module, own, allowed, name):
    target, top = room_of(name), own.split(".")[0]
    target_top = target.split(".")[0] if target else None
    if target is None:
        return [] if name == "twostroke" else [f"{module} imports {name}, which is in no known room"]
    # A room may import its own rooms, but for one that is declarations alone; of another the whole, or a named part.
    inside = target == own or (target_top == top and own not in DECLARATIONS)
    if not inside and not {target, target_top} & allowed.rooms:
        return [f"{module} imports {name}: {own} may import {sorted(allowed.rooms) or 'itself alone'}"]
    if target_top == "backends":
        return _backend_faults(module, name)
    if top == "engine" and module != "twostroke.engine.build" and name in CHOOSERS:
        return [f"{module} imports {name}: inside the engine only build.py does"]
    return []


def _backend_faults(module, name):
    folder = ".".join(name.split(".")[:3])
    if module.startswith("twostroke.backends"):
        # A backend knows itself and the shared parts, never another backend; the registry names modules as strings.
        same = module == folder or module.startswith(f"{folder}.")
        sound = same or folder in SHARED_BACKEND_PARTS
    elif name == "twostroke.backends":
        sound = not module.startswith("twostroke.engine") or module == "twostroke.engine.build"
    else:
        sound = name == "twostroke.backends.interface"
    return [] if sound else [f"{module} imports {name}: a concrete backend is reached through the registry alone"]


def test_a_plan_loads_no_weights_and_no_numbers():
    """What it reads of models is declarations: nothing that it imports brings numpy or the Hub's library along."""
    modules = [name for name in MODULES if room_of(name) in {"cost", "planner", *DECLARATIONS}]
    code = f"import sys, {', '.join(modules)}; print(sorted({{'numpy', 'huggingface_hub'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_package_was_found():
    assert {"twostroke", "twostroke.core.step", "twostroke.backends", "twostroke.engine"} <= set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "twostroke"])
def test_imports_follow_the_arrows(module):
    path = MODULES[module]
    imported = imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    assert faults(module, imported) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("twostroke.core.step", "import numpy"),
        ("twostroke.core.step", "from twostroke.kv.ledger import KVLedger"),
        ("twostroke.kv.ledger", "def f():\n    import numpy as np"),
        ("twostroke.kv.ledger", "from twostroke import cost"),
        ("twostroke.cost.floor", "from twostroke.models.loading import load_checkpoint"),
        ("twostroke.cost.floor", "from ..models import checkpoint"),
        ("twostroke.cost.floor", "from twostroke.models.rope_spec import RopeSpec"),
        ("twostroke.models.spec", "import numpy"),
        ("twostroke.models.spec", "from twostroke.models.families import FAMILIES"),
        ("twostroke.models.families.llama", "import numpy as np"),
        ("twostroke.models.families.llama", "from twostroke.models.weights.tensor import WeightTensor"),
        ("twostroke.planner.estimate", "from twostroke.models.hub import download"),
        ("twostroke.scheduling.scheduler", "from twostroke.models.spec import ModelSpec"),
        ("twostroke.explain.verdict", "from twostroke.engine.step_log import StepLog"),
        ("twostroke.scheduling.scheduler", "from twostroke.backends.interface import Backend"),
        ("twostroke.models.spec", "import torch"),
        ("twostroke.models.spec", "from twostroke.text.tokenizer import Tokenizer"),
        ("twostroke.text.tokenizer", "from twostroke.models.checkpoint import Checkpoint"),
        ("twostroke.text.tokenizer", "import transformers"),
        ("twostroke.backends.host.rows", "from twostroke.kv.ledger import KVLedger"),
        ("twostroke.backends.host.rows", "import llvmlite.binding"),
        ("twostroke.backends.reference.forward", "from twostroke.backends.cpu.kernels import dot"),
        ("twostroke.backends.cpu.kernels.dot", "import torch"),
        ("twostroke.backends", "import twostroke.backends.cpu"),
        ("twostroke.engine.engine", "from twostroke import backends"),
        ("twostroke.engine.engine", "from twostroke.backends.host.sampler import RowSampler"),
        ("twostroke.engine.engine", "from twostroke.models.loading import load_checkpoint"),
        ("twostroke.engine.build", "from twostroke.backends.cpu.backend import CpuBackend"),
        ("twostroke.engine.build", "import pickle"),
        ("twostroke.lab.bench", "from twostroke.cli import units"),
        ("twostroke.lab.bench", "import rich"),
        ("twostroke.engine.engine", "from twostroke.lab.stage import Stage"),
        ("twostroke.planner.simulate", "from twostroke.backends.interface import Backend"),
        ("twostroke.planner.simulate", "from twostroke.engine.engine import Engine"),
        ("twostroke.cli.run", "import numpy"),
        ("twostroke.scheduling.scheduler", "from twostroke.cli import app"),
        ("twostroke.server.client", "from twostroke.scheduling.scheduler import Scheduler"),
        ("twostroke.server.client", "import numpy"),
        ("twostroke.engine.engine", "from twostroke.server.messages import Output"),
        ("twostroke.cli.serve", "import fastapi"),
        ("twostroke.planner.estimate", "from twostroke.engine.shape import shape_of"),
        ("twostroke.planner.estimate", "from twostroke.backends.interface import Backend"),
        ("twostroke.cost.devices", "from twostroke.planner.deployment import Deployment"),
        ("twostroke.cluster.transfer.sockets", "from twostroke.kv.tiers.host import HostTier"),
        ("twostroke.cluster.transfer.nixl", "import torch"),
        ("twostroke.cluster.kv_events", "from twostroke.server.messages import Stats"),
        ("twostroke.cluster.fleet", "import ray"),
        ("twostroke.kv.prefix_index", "from twostroke.cluster.kv_events import KVEvents"),
        ("twostroke.utils", "import math"),
    ],
)
def test_a_wrong_import_is_noticed(module, source):
    assert faults(module, imports_of(source, module)) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("twostroke.core.step", "from twostroke.core.request import Request\nimport math, os.path"),
        ("twostroke.scheduling.scheduler", "from twostroke.kv.ledger import KVLedger"),
        ("twostroke.models.loading", "import numpy.typing as npt\nfrom twostroke import cache"),
        ("twostroke.models.loading", "from twostroke.models.families import family_of_config"),
        ("twostroke.models.families.llama", "from twostroke.models.families import decoder"),
        ("twostroke.cost.dimensions", "from twostroke.models.spec import ModelSpec"),
        ("twostroke.planner.not_run", "from twostroke.models.families import FAMILIES"),
        ("twostroke.backends.cpu.kernels.dot", "from llvmlite import ir\nfrom . import emitter"),
        ("twostroke.backends.cpu.backend", "from twostroke.backends.host.sampler import RowSampler"),
        ("twostroke.engine.build", "from twostroke import backends\nfrom twostroke.models.loading import load"),
        ("twostroke.engine.engine", "from twostroke.backends.interface import Backend"),
        ("twostroke.cli.run", "import typer\nfrom twostroke import __version__"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert faults(module, imports_of(source, module)) == []


def test_the_architectures_table_has_the_same_arrows():
    text = (Path(__file__).resolve().parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = dict(re.findall(r"^\| `(\w+)/` \|[^|]*\| ([^|]*) \|", text, re.MULTILINE))
    assert set(drawn) == {name for name in ROOMS if "." not in name} - {"__main__", "machine", "cache", "config"}
    for name, arrows in drawn.items():
        everything = f"{BELOW_ENGINE} engine lab server planner training web cluster"
        rooms = {"nothing": "", "all rooms": everything}.get(arrows, arrows)
        assert set(rooms.replace(",", " ").split()) == ROOMS[name].rooms, name
