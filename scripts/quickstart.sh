#!/usr/bin/env bash
# Trains a small language model on this machine's CPU and samples from it: nothing to download but packages.
# usage: bash scripts/quickstart.sh [method]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh

method=${1:-adamw}
workdir=runs/quickstart-$method
JAX_PLATFORMS=cpu .venv/bin/python -m nanosam.train --config="configs/quickstart.py:method=$method" --config.workdir="$workdir"
JAX_PLATFORMS=cpu .venv/bin/python -m nanosam.sample --workdir="$workdir" --prompt="Return the"
