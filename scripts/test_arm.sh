#!/usr/bin/env bash
# The kernels' tests on AArch64: cross-compiled with Debian's g++, run under qemu-user.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/test_arm.sh

Compiles the modules base and kernels and the kernels' tests for AArch64 and runs them under qemu-user:
scalar and NEON against each other, and against the digests of x86 (smartinf/kernels/digest_test.cc).
Where the Debian packages for that are missing it says which, and ends well.

  sudo apt-get install g++-aarch64-linux-gnu qemu-user googletest libhwy-dev libxxhash-dev libfmt-dev

Left out: property tests (rapidcheck is there for this machine only), and tests that start the program
again, which qemu-user cannot.
TEXT
}
case ${1:-} in
  "") ;;
  -h | --help) help; exit 0 ;;
  *) usage_error "unknown option '$1'" ;;
esac

missing=()
for needed in g++-aarch64-linux-gnu:/usr/bin/aarch64-linux-gnu-g++ qemu-user:/usr/bin/qemu-aarch64 \
  googletest:/usr/src/googletest/googletest/src/gtest-all.cc libhwy-dev:/usr/include/hwy/highway.h \
  libxxhash-dev:/usr/include/xxhash.h libfmt-dev:/usr/include/fmt/format.h; do
  [ -e "${needed#*:}" ] || missing+=("${needed%%:*}")
done
if [ "${#missing[@]}" -gt 0 ]; then
  say "The kernels are not tested on AArch64: these packages are missing: ${missing[*]}"
  exit 0
fi

build=$root/build/arm
mkdir -p "$build/include"
# These headers are the same on every machine; the rest of /usr/include is this machine's.
for header in hwy fmt xxhash.h xxh3.h; do
  [ ! -e "/usr/include/$header" ] || ln -sfn "/usr/include/$header" "$build/include/$header"
done

compile() {
  local sources=(/usr/src/googletest/googletest/src/{gtest-all,gtest_main}.cc
    smartinf/base/{check,checksum,state_format,status,units}.cc
    smartinf/kernels/{digest,dispatch,every_target,feedback,signs,update,update_rule}_test.cc)
  local source object
  for source in smartinf/kernels/*.cc; do
    case $source in *_test.cc | */kernels_parity.cc) ;; *) sources+=("$source") ;; esac
  done
  # The flags of cmake/toolchain.cmake that decide about numbers; xxHash and fmt come with their headers.
  for source in "${sources[@]}"; do
    object=$build/$(basename "$source" .cc).o
    printf '%s\0' "$source" "$object"
  done | xargs -0 -n 2 -P "$(build_jobs)" sh -c 'exec aarch64-linux-gnu-g++ -std=c++20 -O2 -ffp-contract=off \
    -DXXH_INLINE_ALL -DFMT_HEADER_ONLY -DGTEST_HAS_PTHREAD=1 -I. -isystem '"$build"'/include \
    -isystem /usr/src/googletest/googletest/include -I/usr/src/googletest/googletest -c "$0" -o "$1"'
  aarch64-linux-gnu-g++ -static "$build"/*.o -pthread -o "$build/kernels_tests"
}
step arm-build "Cross-compiling the kernels for AArch64" compile || fail "the build failed"
qemu-aarch64 "$build/kernels_tests" --gtest_filter=-Pin.*:*DeathTest* --gtest_brief=1
