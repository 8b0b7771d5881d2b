#!/usr/bin/env bash
# Install megarl with its engines for machines without a GPU into the virtual environment $1.
# Does nothing when what is installed is what these files ask for.
set -euo pipefail
venv=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
wanted=$(cat setup.py tools/constraints-cpu.txt tools/requirements-cpu-engine.txt | sha256sum)
if [ -f "$venv/.megarl-installed" ] && [ "$(cat "$venv/.megarl-installed")" = "$wanted" ]; then
    exit 0
fi
echo "installing into $venv (about three minutes)"
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint tools/constraints-cpu.txt)
"${pip[@]}" --editable '.[cpu,dev]'
"${pip[@]}" --no-deps --requirement tools/requirements-cpu-engine.txt
echo "$wanted" > "$venv/.megarl-installed"
