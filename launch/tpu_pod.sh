#!/usr/bin/env bash
# Trains on a TPU slice: creates the slice, installs, trains on all its workers, and cleans up.
#
# usage: bash launch/tpu_pod.sh run NAME --config=configs/FILE.py --config.workdir=gs://BUCKET/RUN ...
#        bash launch/tpu_pod.sh logs|stop|status|delete NAME
#
#   run      creates the slice unless it exists, starts the run unless it is running, and follows
#            its log. After a preemption it creates a new slice and resumes from the last checkpoint;
#            a run that stopped after saving (exit 75) is restarted. ctrl-C: the run saves and stops.
#            When the run has ended, whatever the outcome, the slice is deleted.
#   logs     follows the log; ctrl-C does not stop the run
#   stop     asks the run to save and stop
#
# In the environment:
#   ZONE=us-west4-a  ACCELERATOR=v5litepod-8  RUNTIME=v2-alpha-tpuv5-lite  PROJECT (gcloud's own)
#   SPOT=1  cheap chips that may be preempted;  KEEP=1  keep the slice when the run has ended
# shellcheck disable=SC2016  # $ in single quotes is for the workers to expand
set -euo pipefail
cd "$(dirname "$0")/.."

zone=${ZONE:-us-west4-a}
poll=${POLL_SECONDS:-30}
stopping=

say() { echo "tpu_pod: $*" >&2; }
die() { say "$@"; exit 2; }
tpus() { gcloud compute tpus "$@" --zone="$zone" ${PROJECT:+--project="$PROJECT"}; }

state() { tpus queued-resources describe "$name" --format='value(state.state)' 2>/dev/null || echo ABSENT; }

# on WORKER COMMAND: runs a shell command on one worker, or on all
on() { tpus tpu-vm ssh "$name" --worker="$1" --command="$2"; }

delete_slice() { tpus queued-resources delete "$name" --force --quiet; }

wait_for_slice() {
  local state
  while [ -z "$stopping" ]; do
    state=$(state)
    case $state in
      ACTIVE) return ;;
      ABSENT)
        say "asking for ${ACCELERATOR:-v5litepod-8} in $zone as $name"
        tpus queued-resources create "$name" --node-id="$name" ${SPOT:+--spot} \
          --accelerator-type="${ACCELERATOR:-v5litepod-8}" \
          --runtime-version="${RUNTIME:-v2-alpha-tpuv5-lite}" || die "$name could not be created"
        ;;
      SUSPENDED)
        say "$name was preempted"
        delete_slice
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

install() {
  local archive
  archive=$(mktemp)
  git ls-files -z | tar --null --files-from=- -czf "$archive"
  tpus tpu-vm scp "$archive" "$name:nanosam.tar.gz" --worker=all || return
  rm -f "$archive"
  on all 'if kill -0 $(cat nanosam/run.pid) 2>/dev/null; then exit; fi
    mkdir -p nanosam && tar -xzf nanosam.tar.gz -C nanosam && cd nanosam &&
    { command -v python3.11 || sudo apt-get install -qq -y python3.11 python3.11-venv; } >/dev/null &&
    PYTHON=python3.11 && . scripts/install.sh tpu,gcs'
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

finish() {
  [ -n "${KEEP:-}" ] || delete_slice || say "$name could not be deleted and may still cost money"
  exit "$1"
}

run() {
  local code follower
  [[ " $* " == *" --config.workdir="*://* ]] ||
    die "the slice's disks are deleted with it: set --config.workdir=gs://BUCKET/RUN"
  trap 'stopping=1; say "stopping, after saving"; stop || true' INT TERM HUP
  while true; do
    wait_for_slice
    if [ -z "$stopping" ] && install && start "$@"; then
      follow &
      follower=$!
      while kill -0 "$follower" 2>/dev/null; do wait "$follower" || true; done
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
