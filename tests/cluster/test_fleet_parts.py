"""The parts of a fleet, without one: roles from options, options handed on, keys, children that end with their parent,
the file of a fleet on Ray, signals that travel flat."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.in_process import typed
from tests.cluster.routing import is_alive, until
from twostroke.cli.fleet import _roles
from twostroke.cli.options import typed_again
from twostroke.cluster.bound_child import bound
from twostroke.cluster.children import MOST_RESTARTS, Child
from twostroke.cluster.deployment_file import parse_deployment
from twostroke.cluster.keys import environment_of, new_fleet_key, read_secret, router_key, write_secret
from twostroke.cluster.pool_policy import by_replica, flat, unflat
from twostroke.cluster.role import Role
from twostroke.cluster.routers import RouterPlan, check_router
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.kv_config import KVConfig

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_roles_are_two_pools_or_replicas() -> None:
    assert _roles(None, 0, 0) == ("both", "both") and _roles(3, 0, 0) == ("both",) * 3
    assert _roles(None, 1, 2) == ("prefill", "decode", "decode")
    for wrong in ((2, 1, 1), (None, 1, 0), (None, 0, 2)):
        with pytest.raises(BadRequestError):
            _roles(*wrong)


def test_engine_options_are_handed_on_as_they_were_typed() -> None:
    config = EngineConfig(
        threads=3, run_ahead=False, kv=KVConfig(memory_bytes=2 << 30, kind="int8", prefix_caching=False)
    )
    handed_on = " ".join(typed_again(config, EngineConfig()))
    assert handed_on == "--threads 3 --no-run-ahead --kv-memory 2GiB --no-prefix-caching --kv-type int8"
    assert typed_again(EngineConfig(), EngineConfig()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fleet", "fly"), "takes up, status or deploy, not 'fly'"),
        (("fleet", "up"), "needs a model"),
        (("fleet", "deploy"), "needs a file"),
        (("fleet", "up", "smollm2", "--prefill", "1"), "at least one of each"),
        (("fleet", "up", "smollm2", "--router", "nginx"), "a router is one of smg, vllm-router"),
        (("fleet", "status"), "no fleet runs on this machine"),
        (("fleet", "status", "here"), "must be an address like"),
        (("fleet", "status", "http://127.0.0.1:9"), "no router answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: tuple[str, ...], words: str, smollm2_path: Path, tmp_path: Path
) -> None:
    cache = os.environ.get("TWOSTROKE_CACHE") or str(tmp_path)
    done = typed(*arguments, **({"TWOSTROKE_CACHE": cache} if "up" not in arguments else {}))
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_router_that_is_not_here_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.cluster.routers.find_spec", lambda name: None)
    with pytest.raises(BackendError, match="pip install vllm-router"):
        check_router("vllm-router")


def test_keys_are_nobody_else_s(tmp_path: Path) -> None:
    key = new_fleet_key()
    write_secret(tmp_path / "key", key)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600 and read_secret(tmp_path / "key") == key
    assert router_key(key) != key and key not in router_key(key) and router_key(key) == router_key(key)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(BadRequestError, match="others may read it"):
        read_secret(tmp_path / "key")
    command = RouterPlan("smg", "127.0.0.1", 1, 2, False).command({})
    assert not set(environment_of(key).values()) & set(command)


def test_routers_are_told_their_workers() -> None:
    workers = {"http://a:1": Role.PREFILL, "http://b:1": Role.DECODE, "http://c:1": Role.DECODE}
    two_pools = " ".join(RouterPlan("vllm-router", "127.0.0.1", 1, 2, True).command(workers))
    assert "--vllm-pd-disaggregation" in two_pools
    assert "--prefill http://a:1 --decode http://b:1 --decode http://c:1" in two_pools
    plain = " ".join(RouterPlan("vllm-router", "127.0.0.1", 1, 2, False).command(dict.fromkeys(workers, Role.BOTH)))
    assert "--worker-urls http://a:1 http://b:1 http://c:1" in plain
    assert "--pd-disaggregation" in RouterPlan("smg", "127.0.0.1", 1, 2, True).command({})


PARENT = """
import subprocess, sys, time
from twostroke.cluster.bound_child import bound
child = subprocess.Popen(bound([sys.executable, "-c", "import time; time.sleep(600)"]), start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_a_bound_child_ends_with_a_parent_that_was_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        until(lambda: b"time.sleep" in Path(f"/proc/{child}/cmdline").read_bytes() and is_alive(child))
        parent.kill()
    until(lambda: not is_alive(child))


def test_a_child_without_a_parent_does_not_begin() -> None:
    command = bound(SLEEP)
    command[command.index(str(os.getpid()))] = "1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment, timeout=60).returncode == 3


def test_a_lifeline_ends_its_child_when_the_owner_is_gone(tmp_path: Path) -> None:
    tells = "import os, signal, sys, time\n"
    tells += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(sys.argv[1] + '.told', 'w').close()))\n"
    tells += "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    command = [sys.executable, "-P", "-m", "twostroke.cluster.lifeline", "60", sys.executable, "-c", tells]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    note = tmp_path / "pid"
    owner = subprocess.Popen([*command, str(note)], stdin=subprocess.PIPE, env=environment)
    until(lambda: note.exists() and note.read_text())
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait(120) == 0 and not is_alive(int(note.read_text()))
    assert (tmp_path / "pid.told").exists(), "it was told, not killed"


def test_a_child_that_dies_is_started_anew_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.cluster.children.FIRST_BACK_OFF_S", 0.001)
    child = Child(
        "worker-0", [sys.executable, "-c", "import sys; sys.exit('twostroke: no such model')"], {}, tmp_path / "log"
    )
    for _ in range(MOST_RESTARTS + 1):
        child.start()
        assert child.process is not None
        child.process.wait()
        assert child.has_died() == 1 and child.has_died() is None
    assert child.again_s is None and not child.start_if_due() and child.last_words() == "no such model"


def test_a_child_that_is_told_to_end_is_not_started_anew(tmp_path: Path) -> None:
    child = Child("worker-0", SLEEP, {}, tmp_path / "log")
    child.start()
    child.tell(signal.SIGTERM)
    assert child.wait(time.monotonic() + 30) and not child.is_running and child.again_s is None


# On Ray, as far as it can be tried without


FILE = """
model = "smollm2"
options = ["--max-context", "512"]
drain_s = 5
peers = ["10.0.0.0/24", "fd00::/8", "10.7.0.1"]
[router]
port = 8100
[pools.prefill]
max = 3
cpus = 0.5
[pools.decode]
min = 2
max = 2
gpus = 1
options = ["--threads", "1"]
[scaling]
hold_s = 30
"""


def test_a_fleet_s_file() -> None:
    plan = parse_deployment(FILE)
    decode, prefill = plan.pools
    assert (prefill.role, prefill.least, prefill.most, prefill.cpus) == (Role.PREFILL, 1, 3, 0.5)
    assert (decode.least, decode.most, decode.gpus, decode.options) == (2, 2, 1, ("--threads", "1"))
    assert plan.peers == ("10.0.0.0/24", "fd00::/8", "10.7.0.1")
    assert plan.router_url is None and plan.router_port == 8100 and dict(plan.scaling) == {"hold_s": 30}
    there = parse_deployment('model = "m"\nrouter = "http://10.0.0.1:8000"\n[pools.both]\nmax = 2')
    assert there.peers == () and there.router_url == "http://10.0.0.1:8000" and there.pools[0].role is Role.BOTH
    empty = parse_deployment('model = "m"\n[pools.both]\ngpus = 1\nmin = 0')
    assert (empty.pools[0].gpus, empty.pools[0].least, empty.pools[0].most) == (1, 0, 1)
    with pytest.raises(BadRequestError, match="may be empty only behind a router that is started here"):
        parse_deployment('model = "m"\nrouter = "http://10.0.0.1:8000"\n[pools.both]\nmin = 0')


@pytest.mark.parametrize(
    "options", ["", '"--backend", "cuda"', '"--backend=auto"', '"--backend=cpu", "--backend", "cuda"']
)
@pytest.mark.parametrize("has_ranks", [True, False])
def test_several_cards_are_for_a_backend_that_shares_one_model(
    options: str, has_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server would refuse at every start is refused once, by the same question."""
    monkeypatch.setattr("twostroke.backends.BACKENDS", {"cuda": "cards", "cpu": "twostroke.backends.cpu"})
    factory = SimpleNamespace(rank_unit=32) if has_ranks else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cards", SimpleNamespace(FACTORY=factory))
    text = f'model = "m"\noptions = [{options}]\n[pools.both]\ngpus = 4'
    if has_ranks:
        assert parse_deployment(text).pools[0].gpus == 4
    else:
        with pytest.raises(BadRequestError, match=r"pools.both: gpus is 4, and the cuda backend runs no model on sev"):
            parse_deployment(text)
    assert parse_deployment(f'{text}\noptions = ["--backend", "cpu"]').pools[0].gpus == 4


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('model = "smollm2"', "", "model must be a name or a path"),
        ("[pools.decode]", "[pools.both]", "or [pools.both]; here: prefill, both"),
        ("max = 3", "max = 0", "pools.prefill: max must be an integer from 1"),
        ("min = 2", "min = 3", "max is 2, which is less than min, 3"),
        ("min = 2", "min = -1", "min must be an integer from 0"),
        ("gpus = 1", "gpus = 2", "pools.decode: gpus is 2, and several cards for one copy do not hand KV over yet"),
        ("[router]\nport = 8100", "[router]\nport = 0", "port must be an integer from 1"),
        ("cpus = 0.5", 'cpus = "many"', "cpus must be a number from 0"),
        ("gpus = 1", "cards = 2", "has no field 'cards'"),
        ('options = ["--threads", "1"]', 'options = "--threads 1"', "options must be a list of texts"),
        ("[router]", "[router", "this is not TOML"),
        ('"10.7.0.1"]', '"10.7.0.0/40"]', "peers must be an address or a network (10.0.0.0/24), or a name, not"),
        ('"10.7.0.1"]', "10]", "peers must be a list of texts"),
    ],
)
def test_a_slip_in_it_is_one_sentence(old: str, new: str, words: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse_deployment(FILE.replace(old, new))
    assert words in str(refused.value) and "\n" not in str(refused.value)


SIGNALS: dict[str, Any] = {
    "waiting": 3,
    "max_running": 8,
    "prefill_backlog_s": 1.25,
    "kv_full_s": None,
    "levels": [{"name": "chat/fast", "waiting": 2, "ttft_s": 0.5, "itl_s": None}],
    "goodput": {"chat/fast": 1.0},
    "doubt": "too little was seen",
}


def test_signals_travel_flat() -> None:
    numbers = flat(SIGNALS)
    assert numbers["levels/chat/fast/ttft_s"] == 0.5 and all(isinstance(value, float) for value in numbers.values())
    assert unflat(numbers) == {
        "waiting": 3,
        "max_running": 8,
        "prefill_backlog_s": 1.25,
        "levels": [{"name": "chat/fast", "waiting": 2, "ttft_s": 0.5}],
    }
    assert by_replica({"waiting": {"a": 1.0, "b": 2.0}, "load": {"a": 3.0}}) == {
        "a": {"waiting": 1.0, "load": 3.0},
        "b": {"waiting": 2.0},
    }


def ray_context(metrics: Any, replicas: int, queued: float = 0.0, target: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=replicas,
        target_num_replicas=replicas if target is None else target,
        total_queued_requests=queued,
    )


def test_a_pool_grows_with_its_backlog_and_holds_before_it_shrinks() -> None:
    pytest.importorskip("twostroke.cluster.autoscale")
    from twostroke.cluster.pool_policy import PoolPolicy

    now_s = [0.0]
    scaling = {"hold_s": 20.0, "settle_s": 1.0, "start_s": 5.0}
    policy = PoolPolicy("prefill", 1, 4, scaling, clock=lambda: now_s[0])

    def asked(backlog_s: float, replicas: int) -> int:
        level = {"name": "chat", "waiting": 8, "prefill_backlog_s": backlog_s, "ttft_s": 1.0}
        own = flat({"waiting": 8 if backlog_s else 0, "prefill_backlog_s": backlog_s, "levels": [level]})
        metrics = {name: {f"r{place}": value for place in range(replicas)} for name, value in own.items()}
        now_s[0] += 2.0
        found, state = policy(ray_context(metrics, replicas))
        assert state["why"]
        return found

    assert asked(0.0, 1) == 1
    grown = [asked(8.0, 1) for _ in range(6)][-1]
    assert grown > 1
    assert asked(0.0, grown) == grown, "a moment's rest is no reason to drain"
    assert [asked(0.0, grown) for _ in range(20)][-1] == 1


def test_a_pool_that_may_be_empty_is_when_it_had_time_to_start_and_nothing_to_do() -> None:
    from twostroke.cluster.pool_policy import PoolPolicy

    now_s = [100.0]
    policy = PoolPolicy("both", 0, 4, {"idle_s": 20.0, "hold_s": 10.0}, clock=lambda: now_s[0])
    nothing = {name: {"r0": value} for name, value in flat({"waiting": 0, "levels": []}).items()}

    def asked(after_s: float, replicas: int, queued: float = 0.0, target: int | None = None) -> tuple[int, str]:
        now_s[0] += after_s
        found, state = policy(ray_context(nothing if replicas else {}, replicas, queued, target))
        return found, state["why"]

    for _ in range(10):
        assert asked(5.0, 0, target=1)[0] == 1, "the first is starting, and takes its time"
    assert asked(5.0, 1)[0] == 1
    assert asked(20.0, 1) == (0, "there was no work for 25 s")
    assert asked(2.0, 0)[0] == 0
    assert asked(2.0, 0, queued=0.5) == (1, "1 requests wait, and no replica is there")
    assert asked(5.0, 1)[0] == 1, "and it is given time to serve them"
    assert asked(30.0, 1)[0] == 0
