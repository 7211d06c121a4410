"""The first prompt after an install, and after the next two starts: fresh processes over a cache folder that holds the
model and nothing else, then over what the first left there. Each reads one short prompt as its first, writes 60 tokens,
and reads five others. With --also, the sources of another checkout take turns with these.

    python bench/first_prompt.py [--model smollm2] [--repeats 9] [--rest 3] [--also OTHER_CHECKOUT]"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from twostroke.models.resolve import resolve

STARTS = ("first", "second", "third")
HERE = Path(__file__).resolve().parents[1]

CHILD = """
import json, resource, sys, time
started_s = time.perf_counter()
from twostroke import LLM, SamplingParams
llm = LLM(sys.argv[1])
ready_s = time.perf_counter() - started_s
prompt = "Explain in two sentences why the sky is blue."
ids = llm.chat_token_ids([{"role": "user", "content": prompt}])
before = resource.getrusage(resource.RUSAGE_SELF)
timing = llm.generate(ids, SamplingParams(max_tokens=1, temperature=0.0))[0].timing
after = resource.getrusage(resource.RUSAGE_SELF)
stream = llm.generate(ids, SamplingParams(max_tokens=60, temperature=0.0))[0].timing
others = [[token + shift for token in ids] for shift in range(1, 6)]
read_s = [llm.generate(other, SamplingParams(max_tokens=1))[0].timing.prefill_s for other in others]
resident = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(json.dumps({
    "ready, ms": 1e3 * ready_s,
    "first prefill, ms": 1e3 * timing.prefill_s,
    "both, ms": 1e3 * (ready_s + timing.prefill_s),
    "best of five later prefills, ms": 1e3 * min(read_s),
    "system time in the first prefill, ms": 1e3 * (after.ru_stime - before.ru_stime),
    "page faults in the first prefill": after.ru_minflt - before.ru_minflt,
    "of them to disk": after.ru_majflt - before.ru_majflt,
    "TPOT, ms": 1e3 * stream.tpot_s,
    "resident, MB": int(resident.split()[1]) / 1e3,
}))
"""


def three_starts(checkout: Path, name: str, model: Path, rest_s: float) -> list[dict[str, float]]:
    """What each start found, over a cache folder of their own."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:  # beside the model: a link costs nothing
        (Path(folder) / "models").mkdir()
        os.link(model, Path(folder) / "models" / model.name)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"TWOSTROKE_CACHE": folder, "PYTHONPATH": f"{checkout / 'src'}"}
        found = []
        for _ in STARTS:
            time.sleep(rest_s)
            command = [sys.executable, "-c", CHILD, name]
            finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if finished.returncode:
                raise SystemExit(finished.stderr)
            found.append(json.loads(finished.stdout.splitlines()[-1]))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name that is one file")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rest", type=float, default=3.0, help="seconds before each process, for a machine that tires")
    parser.add_argument("--also", type=Path, help="another checkout")
    options = parser.parse_args()
    model = resolve(options.model)
    checkouts = {"this": HERE} | ({} if options.also is None else {"other": options.also.resolve()})
    found: dict[str, list[list[dict[str, float]]]] = {label: [] for label in checkouts}
    for repeat in range(options.repeats):
        labels = list(checkouts)
        for label in labels if repeat % 2 else reversed(labels):
            found[label].append(three_starts(checkouts[label], options.model, model, options.rest))
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{options.model}, {options.repeats} times three starts; median, least and most; load average {load}")
    for index, start in enumerate(STARTS):
        print(f"the {start} start")
        for name in found["this"][0][index]:
            columns = []
            for label in checkouts:
                values = [starts[index][name] for starts in found[label]]
                middle = statistics.median(values)
                columns.append(f"{label} {middle:7.1f} ({min(values):.1f} to {max(values):.1f})")
            print(f"  {name:<38}" + "".join(f"{column:<36}" for column in columns).rstrip())


if __name__ == "__main__":
    main()
