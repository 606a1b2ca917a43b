#!/usr/bin/env bash
# Trains on a TPU slice: creates the slice, installs, trains on all its workers, and cleans up.
#
# usage: bash launch/tpu_pod.sh run NAME [--dry_run] --config=FILE.py --config.workdir=gs://BUCKET/RUN ...
#        bash launch/tpu_pod.sh logs|stop|status|delete NAME
#        bash launch/tpu_pod.sh --help
#
#   run      creates the slice unless it exists, starts the run unless it is running, and follows
#            its log. After a preemption it creates a new slice and resumes from the last checkpoint;
#            a run that stopped after saving (exit 75) is restarted. ctrl-C: the run saves and stops.
#            When the run has ended, or cannot be set up, the slice is deleted.
#            The run is checked here first, and all files that git does not ignore are shipped.
#            --dry_run: only says what it would do
#   logs     follows the log; ctrl-C does not stop the run
#   stop     asks the run to save and stop
#
# In the environment:
#   ZONE=us-west4-a  ACCELERATOR=v5litepod-8  RUNTIME=v2-alpha-tpuv5-lite  PROJECT (gcloud's own)
#   SPOT=1  cheap chips that may be preempted;  KEEP=1  keep the slice when the run has ended
#   TRIES=3  of the installation, one after another;  PYTHON=.venv/bin/python  that checks the run
# shellcheck disable=SC2016  # $ in single quotes is for the workers to expand
set -euo pipefail
cd "$(dirname "$0")/.."

zone=${ZONE:-us-west4-a}
poll=${POLL_SECONDS:-30}
stopping=
rented=  # whether there is a slice

say() { echo "tpu_pod: $*" >&2; }
die() { say "$@"; exit 2; }
tpus() { gcloud compute tpus "$@" --zone="$zone" ${PROJECT:+--project="$PROJECT"}; }

state() { tpus queued-resources describe "$name" --format='value(state.state)' 2>/dev/null || echo ABSENT; }

# on WORKER COMMAND: runs a shell command on one worker, or on all
on() { tpus tpu-vm ssh "$name" --worker="$1" --command="$2"; }

delete_slice() { tpus queued-resources delete "$name" --force --quiet; }

accelerator=${ACCELERATOR:-v5litepod-8}
create_slice() {
  tpus queued-resources create "$name" --node-id="$name" ${SPOT:+--spot} \
    --accelerator-type="$accelerator" --runtime-version="${RUNTIME:-v2-alpha-tpuv5-lite}"
}

wait_for_slice() {
  local state
  while [ -z "$stopping" ]; do
    state=$(state)
    [ "$state" = ABSENT ] || rented=1
    case $state in
      ACTIVE) return ;;
      ABSENT)
        say "asking for $accelerator in $zone as $name"
        create_slice || die "$name could not be created"
        ;;
      SUSPENDED)
        say "$name was preempted"
        delete_slice
        rented=
        ;;
      FAILED) die "the request failed; see: gcloud compute tpus queued-resources describe $name" ;;
      *)
        say "$name is $state"
        pause
        ;;
    esac
  done
}

pause() { sleep "$poll" & wait $! || true; }  # a signal ends the wait, but not a plain sleep

# What is shipped: everything here that git does not ignore, committed or not, and not the results.
files() {
  git ls-files -z --cached --others --exclude-standard -- . ':!results' |
    while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done
}

install() {
  local archive
  archive=$(mktemp)
  files | tar --null --files-from=- -czf "$archive" || return
  tpus tpu-vm scp "$archive" "$name:nanosam.tar.gz" --worker=all || return
  rm -f "$archive"
  on all 'if kill -0 $(cat nanosam/run.pid) 2>/dev/null; then exit; fi
    set -e  # and no && below, which would switch it off
    mkdir -p nanosam
    tar -xzf nanosam.tar.gz -C nanosam
    cd nanosam
    { command -v python3.11 || sudo apt-get install -qq -y python3.11 python3.11-venv; } >/dev/null
    PYTHON=python3.11
    . scripts/install.sh tpu,gcs'
}

# Starts the run on every worker where it is not running. It outlives the connection, and writes its
# exit code to a file.
start() {
  local words
  words=$(printf ' %q' "$@")
  on all "cd nanosam && if ! kill -0 \$(cat run.pid) 2>/dev/null; then
    rm -f run.code
    nohup setsid bash -c $(printf '%q' "trap : TERM
      .venv/bin/python -m nanosam.train$words
      echo \$? > run.code") </dev/null >run.log 2>&1 &
    echo \$! > run.pid
  fi"
}

follow() { on 0 'cd nanosam && tail -n 100 -F --pid=$(cat run.pid) run.log 2>/dev/null'; }

# The largest exit code of the workers; nothing if one cannot be reached.
exit_code() {
  local codes
  codes=$(on all 'until ! kill -0 $(cat nanosam/run.pid) 2>/dev/null; do sleep 1; done
    cat nanosam/run.code') && sort -n <<<"$codes" | tail -n 1
}

stop() { on all 'kill -TERM -- -$(cat nanosam/run.pid)'; }

# However the script ends, no slice is left behind that costs money.
clean_up() {
  if [ -n "$rented" ] && [ -z "${KEEP:-}" ]; then
    rented=
    delete_slice || say "$name could not be deleted and may still cost money"
  fi
}

finish() {
  clean_up
  exit "$1"
}

check() {
  local python=${PYTHON:-.venv/bin/python}
  [ -x "$(command -v "$python")" ] ||
    die "the run is checked here first, and there is no $python: bash scripts/quickstart.sh installs, or set PYTHON"
  PYTHONPATH=. JAX_PLATFORMS=cpu "$python" launch/check.py "$@" || exit
  command -v gcloud >/dev/null || die "gcloud is not installed: see https://cloud.google.com/sdk/docs/install"
}

# Installs and starts the run; 1 if the slice is there and that still fails, after some tries.
set_up() {
  local log try
  log=$(mktemp)
  for ((try = 1; try <= ${TRIES:-3}; try++)); do
    if { install && start "$@"; } >"$log" 2>&1; then return; fi
    [ -z "$stopping" ] && [ "$(state)" = ACTIVE ] || return 2  # it is gone: make a new one
    cat "$log" >&2
    say "the workers could not be set up (try $try of ${TRIES:-3}): $(grep -v '^\s*$' "$log" | tail -n 1)"
    pause
  done
  return 1
}

dry_run() {
  local untracked
  untracked=$(git ls-files --others --exclude-standard -- . ':!results' | wc -l)
  say "would ask for $accelerator in $zone as $name:"
  tpus() { echo gcloud compute tpus "$@" --zone="$zone" ${PROJECT:+--project="$PROJECT"}; }
  create_slice
  say "would ship $(files | tr -cd '\0' | wc -c) files, $untracked of them not in git, and start on every worker:"
  echo python -m nanosam.train "$@"
}

run() {
  local code follower words=() dry=
  for word in "$@"; do
    if [ "$word" = --dry_run ]; then dry=1; else words+=("$word"); fi
  done
  set -- "${words[@]}"
  check "$@"
  if [ -n "$dry" ]; then dry_run "$@"; exit; fi
  trap 'stopping=1; say "stopping, after saving"; stop || true' INT TERM HUP
  trap clean_up EXIT
  while true; do
    wait_for_slice
    if [ -z "$stopping" ]; then
      code=0
      set_up "$@" || code=$?
      if [ "$code" -eq 0 ]; then
        follow &
        follower=$!
        while kill -0 "$follower" 2>/dev/null; do wait "$follower" || true; done
      elif [ "$code" -eq 1 ]; then
        finish 1
      fi
    fi
    code=$(exit_code || true)
    if [ -n "$stopping" ]; then
      finish "${code:-75}"
    elif [ -z "$code" ]; then
      say "$name does not respond"
      pause
    elif [ "$code" -eq 75 ]; then
      say "stopped after saving; starting again"
    else
      finish "$code"
    fi
  done
}

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  sed -n '2,/^# shellcheck/s/^# \{0,1\}//p' "launch/tpu_pod.sh" | sed '$d'
  exit
fi
command=${1:-}
name=${2:-}
[ -n "$name" ] || die "usage: bash launch/tpu_pod.sh run|logs|stop|status|delete NAME ..."
shift 2
case $command in
  run) run "$@" ;;
  logs) follow ;;
  stop) stop ;;
  status) state ;;
  delete) delete_slice ;;
  *) die "unknown command '$command': run, logs, stop, status or delete" ;;
esac
