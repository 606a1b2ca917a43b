#!/usr/bin/env bash
# Installs what the tests need and runs them.
# usage: bash scripts/test.sh [--full] [pytest arguments]
#   --full   the slow tier instead: processes, kills, long compiles
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh test

tier="not full"
if [ "${1:-}" = --full ]; then
  tier="full"
  shift
fi
export JAX_PLATFORMS=cpu WANDB_MODE=offline
.venv/bin/ruff check --no-cache .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest -q -n 2 -m "$tier" "$@"
