#!/usr/bin/env bash
# FILE.cu (from `cargo run -p metal-emulator --example kernels -- --cuda`) to PTX: clang's own back end, no CUDA toolkit.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
swizzle=$(ls -t "$here"/../../target/metal-emulator/*/include/swizzle.h 2>/dev/null | head -1)
exec "${CLANG:-clang++-19}" -x cuda -std=c++17 --cuda-device-only -nocudainc -nocudalib --cuda-gpu-arch="${ARCH:-sm_90}" \
  --cuda-feature=+ptx83 -fdeclspec -ffp-contract=off -O2 -gline-tables-only -Xclang -ffloat16-excess-precision=none \
  -Xclang -cl-single-precision-constant -Wno-everything -I "$here/include" -I "$here/../metal-emulator/stdlib" \
  -I "$(dirname "$swizzle")" -S -o "$2" "$1"
