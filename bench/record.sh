#!/usr/bin/env bash
# Runs a command and keeps what it printed, with the date, the machine and the versions, as bench/results/NAME.txt:
#   bench/record.sh NAME COMMAND [ARGUMENT ...]
# Standard input is passed on, and kept too where it is a pipe.
set -euo pipefail
name=$1
shift
results="$(cd "$(dirname "$0")" && pwd)/results"
python=${PYTHON:-python3}
typed=""
if [ -p /dev/stdin ]; then typed=$(cat); fi
{
    printf 'command   '
    for word in "$@"; do if [[ $word == *[[:space:]]* ]]; then printf '"%s" ' "$word"; else printf '%s ' "$word"; fi; done
    printf '\ndate      %s\n' "$(date -u '+%Y-%m-%d %H:%M UTC')"
    printf 'machine   %s cores of %s, %s, %s\n' "$(nproc)" \
        "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)" "$(uname -m)" "$(uname -s)"
    printf 'load      %s (average of the last minute, before the run)\n' "$(cut -d' ' -f1 /proc/loadavg)"
    "$python" - <<'VERSIONS'
import platform
from importlib.metadata import PackageNotFoundError, version

try:
    import llvmlite.binding

    print("cpu       ", llvmlite.binding.get_host_cpu_name(), " (LLVM's name for it)", sep="")
except ImportError:
    pass
found = [f"Python {platform.python_version()}"]
for package in ("twostroke", "numpy", "llvmlite", "tokenizers"):
    try:
        found.append(f"{package} {version(package)}")
    except PackageNotFoundError:
        pass
print("versions  ", ", ".join(found), sep="")
VERSIONS
    if [ -n "$typed" ]; then printf '\ntyped, a line a turn:\n%s\n' "$typed"; fi
    printf '\noutput (both streams; the answer is on standard output, the rest on standard error):\n'
    started=$(date +%s.%N)
    status=0
    if [ -n "$typed" ]; then printf '%s\n' "$typed" | "$@" 2>&1 || status=$?; else "$@" 2>&1 </dev/null || status=$?; fi
    awk -v a="$started" -v b="$(date +%s.%N)" -v s="$status" \
        'BEGIN { printf "\nexit code %d after %.1f s, start of the process included\n", s, b - a }'
} | sed 's/[[:space:]]*$//' >"$results/$name.txt"
cat "$results/$name.txt"
