# shellcheck shell=bash
# Sourced by the other scripts: makes .venv and installs what pyproject.toml names, once.
# usage: . scripts/install.sh [extra,...]

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "nanosam: needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Set PYTHON to one." >&2
  exit 2
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

extras=${1:+[$1]}
stamp=.venv/.installed${1:+-$1}
wanted="$(cat pyproject.toml constraints.txt) extras: $extras"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "nanosam: installing into .venv (once) ..." >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$extras"
  printf '%s' "$wanted" > "$stamp"
fi
