#!/usr/bin/env bash
# Records launches and builds PTX: prepare.sh FOLDER makes FOLDER/launches and FOLDER/ptx, for run.py on a machine with an NVIDIA GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "$1/ptx"
out=$(cd "$1" && pwd)
METAL_LAUNCHES="$out/launches" cargo test --test metal
cargo build -q -p metal-emulator --example kernels
cat "$out"/launches/*.json | grep -oE '"file": "[^"]*", "defines": \[[^]]*\]' | sort -u |
  sed -E 's/"file": "([^"]*)", "defines": \[([^]]*)\]/\1 \2/; s/[",]//g' | while read -r file defines; do
    name=${file%.metal}
    for d in $defines; do name="$name-${d/=/}"; done
    target/debug/examples/kernels --cuda ${defines:+$(printf -- '-D%s ' $defines)} "metal/$file" >"$out/ptx/$name.cu" 2>"$out/ptx/$file.slots"
    tests/metal-gpu/build.sh "$out/ptx/$name.cu" "$out/ptx/$name.ptx"
  done
{
  first=1
  printf '{'
  for s in "$out"/ptx/*.slots; do
    [ $first = 1 ] || printf ', '
    first=0
    printf '"%s": {%s}' "$(basename "$s" .slots)" "$(awk '{printf "%s\"%s\": %s", sep, $1, $2; sep=", "}' "$s")"
  done
  printf '}\n'
} >"$out/ptx/slots.json"
rm "$out"/ptx/*.slots
