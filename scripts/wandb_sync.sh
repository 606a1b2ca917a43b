#!/usr/bin/env bash
# Uploads what W&B recorded offline, from a machine that has a network and an account.
#
#   bash scripts/wandb_sync.sh DIR... [--dry-run and other options of `wandb sync`]
#
# DIR is a workdir, or a folder that holds some. A run that was stopped and resumed has several
# recordings; they end up as one run. What has been uploaded before is skipped.
set -euo pipefail

fail() {
  echo "wandb_sync: $1" >&2
  exit "${2:-1}"
}

wandb=$(dirname "$0")/../.venv/bin/wandb
[[ -x $wandb ]] || wandb=$(command -v wandb) || fail "needs wandb: pip install -e ."

folders=() options=()
for word in "$@"; do
  if [[ $word == -* ]]; then options+=("$word"); else folders+=("$word"); fi
done
((${#folders[@]})) || fail "usage: wandb_sync.sh DIR... [options of wandb sync]" 2
for folder in "${folders[@]}"; do
  [[ -d $folder ]] || fail "no such folder: $folder" 2
done

mapfile -d '' -t found < <(
  find "${folders[@]}" -type d -path '*/wandb/offline-run-*' -prune -print0 | sort -z
)
((${#found[@]})) || fail "no offline recordings (wandb/offline-run-*) in ${folders[*]}"
exec "$wandb" sync --yes "${options[@]}" "${found[@]}"
