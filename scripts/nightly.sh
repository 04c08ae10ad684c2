#!/usr/bin/env bash
# What takes too long for every change: thread sanitizer, long power-cut runs, the wheel, the kernels on
# AArch64, fuzzing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/nightly.sh [options]

Runs scripts/test.sh with the thread sanitizer, then the tests of links and unequal devices against
the clock, then the tests that take long (the quickstart beside torch's AdamW;
two real models, fetched as Python packages, beside transformers; a training run killed
50 times; ranks killed, stopped or cut off from each other 60 times; graph networks killed 200 times; remote devices over
bad networks, with both sides killed; all of OpenCL's programs beside the cores; 146 million parameters on a test accelerator of 256 MB; a state of 4 GB checked and copied
with 256 MiB of memory, which takes 17 GB of disk in /tmp or SMARTINF_STATE_DIR), then
smartinf-crashtest with ten seeds of 1000 power cuts, then
tests/reliability (states, processes and inputs harmed in some 1700 ways, counted in a table), then
scripts/gpu_check.sh without a GPU (which fetches another torch), then the wheel
(scripts/wheel.sh, which fetches auditwheel), then the kernels' tests on AArch64 (where qemu is
there), then each fuzz target (where clang is there). Stops at the first failure.

  --fuzz-seconds N   time for each fuzz target (default 600)
  --help             this text
TEXT
}

fuzz_seconds=600
while [ $# -gt 0 ]; do
  case $1 in
    --fuzz-seconds) [ $# -ge 2 ] || usage_error "--fuzz-seconds needs a number"; fuzz_seconds=$2; shift ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done

SMARTINF_TEST_ALL=1 scripts/test.sh --thread
say "Links and unequal devices against the clock"
SMARTINF_TEST_TIMING=1 ctest --test-dir build/release -R '^(csd|engine)$' --output-on-failure
say "Tests that take long"
ctest --test-dir build/release -C Nightly -L nightly --output-on-failure
for seed in 1 2 3 4 5 6 7 8 9 10; do
  say "Power cuts, seed $seed"
  formats=()
  [ $((seed % 2)) = 0 ] || formats=(--master m24 --state-format q4)
  build/release/bin/smartinf-crashtest --seed "$seed" --points 1000 "${formats[@]}"
done

say "Harmed states, processes and inputs"
ctest --test-dir build/release -C Nightly -R '^reliability_long$' --verbose

# The check for machines with a GPU, as it runs there: with a torch of its own, from carried libraries, without a
# network, but on the test accelerator.
gpu=build/gpu
for python in python3.12 python3.13 python3; do
  if "$python" -m venv "$gpu/venv" 2>/dev/null; then break; fi
done
step gpu-python "Installing torch 2.11 in $gpu/venv" "$gpu/venv/bin/pip" install torch==2.11.0 nanobind transformers peft ||
  fail "torch 2.11 could not be installed" "Is the package index reachable?"
scripts/gpu_check_deps.sh --python "$gpu/venv/bin/python" "$gpu/deps"
unshare --map-root-user --net scripts/gpu_check.sh --quick --seconds 3600 --deps "$gpu/deps" --python "$gpu/venv/bin/python"

scripts/wheel.sh
scripts/test_arm.sh

if ! command -v clang++ >/dev/null; then
  say "No clang++: fuzzing is left out (Debian: clang libclang-rt-14-dev)"
  exit 0
fi
step configure-fuzz "Configuring build/fuzz" cmake -S . -B build/fuzz -G Ninja \
  -DCMAKE_CXX_COMPILER=clang++ -DSMARTINF_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DSMARTINF_TORCH=OFF -DSMARTINF_TESTS=OFF \
  -DSMARTINF_APPS=OFF -DSMARTINF_PYTHON_PACKAGE=OFF || fail "cmake could not configure build/fuzz"
step build-fuzz "Building build/fuzz" cmake --build build/fuzz --target fuzzers -j "$(build_jobs)" ||
  fail "the build of build/fuzz failed"
for target in build/fuzz/bin/*_fuzz; do
  name=$(basename "$target" _fuzz)
  corpus=build/fuzz/corpus/$name
  mkdir -p "$corpus"
  say "Fuzzing $name for $fuzz_seconds s"
  "$target" -max_total_time="$fuzz_seconds" -print_final_stats=1 "$corpus" "fuzz/corpus/$name"
done
