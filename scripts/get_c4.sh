#!/usr/bin/env bash
# Fetches the first K of the 1024 hosted training shards of C4 (en), and one for validation.
#
#   bash scripts/get_c4.sh K [DIR]        (DIR: c4 if not given)
#
# A shard has about 320 MB, 356,000 documents and 170 million tokens; the paper's fixed-length runs
# take eight. Run again after an interruption, it resumes. NANOSAM_C4_URL names another mirror.
set -euo pipefail

base=${NANOSAM_C4_URL:-https://huggingface.co/datasets/allenai/c4/resolve/main/en}
attempts=5

fail() {
  echo "get_c4: $1" >&2
  exit "${2:-1}"
}

is_whole() { # gzip keeps a checksum of its content
  [[ -s $1 ]] && gzip --test "$1" 2>/dev/null
}

fetch() {
  local name=$1 part="$1.part" status progress=(--silent --show-error)
  if is_whole "$name"; then
    echo "have    $name"
    return
  fi
  if [[ -t 2 ]]; then progress=(--progress-bar); fi
  for ((attempt = 1; attempt <= attempts; attempt++)); do
    echo "fetch   $name"
    status=0
    curl "${progress[@]}" --fail --location --continue-at - --connect-timeout 30 \
      --speed-limit 1000 --speed-time 60 --output "$part" "$base/$name" || status=$?
    if is_whole "$part"; then
      mv "$part" "$name"
      return
    fi
    case $status in
      0 | 22 | 33) rm -f "$part" ;; # all there and still bad, or the server cannot go on: anew
    esac
    sleep $((attempt < attempts ? attempt : 0))
  done
  fail "cannot get $base/$name (curl: $status); run the same command to go on, or name a mirror in NANOSAM_C4_URL"
}

[[ $# -ge 1 && $# -le 2 && $1 =~ ^[0-9]+$ ]] || fail "usage: get_c4.sh K [DIR]" 2
count=$((10#$1))
((count >= 1 && count <= 1024)) || fail "K is $1, but there are shards 1 to 1024" 2
command -v curl >/dev/null || fail "needs curl; install it"

echo "C4 is licensed under ODC-BY 1.0 (https://opendatacommons.org/licenses/by/1-0); its content is"
echo "bound by the terms of use of Common Crawl besides (https://commoncrawl.org/terms-of-use)."
mkdir -p "${2:-c4}" || fail "cannot write to ${2:-c4}; name another directory"
cd "${2:-c4}"
fetch c4-validation.00000-of-00008.json.gz
for ((i = 0; i < count; i++)); do
  fetch "$(printf 'c4-train.%05d-of-01024.json.gz' "$i")"
done

found=$(find . -maxdepth 1 -name 'c4-train.*-of-01024.json.gz' | wc -l)
((found >= count)) || fail "only $found of $count training shards are in $PWD; run the same command again"
echo "$count training shards and one for validation are in $PWD, whole. Now:"
echo "  python -m nanosam.data.prepare --input='$PWD/c4-train.*.json.gz' --validation='$PWD/c4-validation.*.json.gz' --output=DIR"
