#!/usr/bin/env bash
# What the core costs to get: the bytes of its wheels, the seconds to install them into a fresh environment, and the
# bytes on disk after. Everything happens in a temporary folder. PYTHON chooses the interpreter.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
seconds_since() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }'; }

mapfile -t requirements < <("$python" -c '
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print(*tomllib.load(file)["project"]["dependencies"], sep="\n")' "$root/pyproject.toml")
"$python" -m venv "$scratch/venv"
pip="$scratch/venv/bin/pip"
"$pip" download -qq --disable-pip-version-check --only-binary=:all: -c "$root/constraints.txt" -d "$scratch/wheels" "${requirements[@]}"
du -cb "$scratch"/wheels/*.whl | awk -v n="$(ls "$scratch/wheels" | wc -l)" 'END { printf "download  %.1f MB in %d wheels\n", $1 / 1e6, n }'
ls -lS "$scratch/wheels" | awk 'NR > 1 && NR < 6 { printf "          %.1f MB %s\n", $5 / 1e6, $9 }'
started=$(date +%s.%N)
"$pip" install -qq --disable-pip-version-check --no-index --find-links "$scratch/wheels" "${requirements[@]}"
printf 'install   %s s from those wheels, into a fresh environment\n' "$(seconds_since "$started")"
du -sb "$scratch/venv" | awk '{ printf "on disk   %.0f MB, with Python'"'"'s own pip\n", $1 / 1e6 }'
