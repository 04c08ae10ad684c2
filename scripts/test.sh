#!/usr/bin/env bash
# Everything that must hold before a change lands: builds, then runs all tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/test.sh [options]

Runs scripts/setup.sh, builds everything, and runs all tests. With --sanitizers what handles bytes of
devices and of the network runs once more under the address and undefined-behaviour sanitizers (with
SMARTINF_TEST_ALL=1, as at night, all modules). Ends with ctest's summary over all of
them, and fails where something that this machine has (io_uring, loop devices, ext4, hwloc, OpenSSL, gRPC, OpenCL, torch) was
not tested.

  --quick           release build only, without the tests labelled "slow"
  --sanitizers      also under the address and undefined-behaviour sanitizers
  --thread          also under these and the thread sanitizer, as scripts/nightly.sh does (much slower)
  --no-torch, --python PATH, --no-system   as in scripts/setup.sh
  --help            this text

Examples:
  scripts/test.sh
  scripts/test.sh --quick
  ctest --preset release -R storage      one test of what is built
TEXT
}

trees=(release) ctest_options=() setup_options=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) trees=(release); ctest_options+=(-LE slow) ;;
    --sanitizers) trees=(release asan) ;;
    --thread) trees=(release asan tsan) ;;
    --no-torch | --no-system | --python=*) setup_options+=("$1") ;;
    --python) [ $# -ge 2 ] || usage_error "--python needs a path"; setup_options+=("$1" "$2"); shift ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done

scripts/setup.sh "${setup_options[@]}"
for tree in "${trees[@]}"; do
  # setup.sh has configured the release tree, with or without torch.
  [ "$tree" = release ] || step "configure-$tree" "Configuring build/$tree" cmake --preset "$tree" ||
    fail "cmake could not configure build/$tree"
  targets=()
  if [ "$tree" = asan ] && [ -z "${SMARTINF_TEST_ALL:-}" ]; then
    targets=(--target {base,kernels,storage,compress,csd,serve,device_contract,engine}_tests
      {superblock,layout,table,compressed,remote,recipe,container}_replay)
    ctest_options+=(-E '^(plan|sim|train|config|fpga)\.address')
  fi
  step "build-$tree" "Building build/$tree" cmake --build "build/$tree" -j "$(build_jobs)" "${targets[@]}" ||
    fail "the build of build/$tree failed" "Log: build/logs/build-$tree.log"
done

# One run over all trees, so that its summary is the summary of everything.
mkdir -p build/all
printf 'subdirs("../%s")\n' "${trees[@]}" >build/all/CTestTestfile.cmake
# The states of the tests are in memory where there is room and direct I/O: on a drive half of the time
# would be syncs. The tests of storage, of faults, of file systems and of the command without training
# stay on the drive.
if [ -z "${SMARTINF_TEST_FOLDER:-}" ] && [ -w /dev/shm ] &&
  [ "$(df -Pk /dev/shm | awk 'NR == 2 {print int($4 / 1048576)}')" -ge 4 ] &&
  SMARTINF_TEST_FOLDER=$(mktemp -d /dev/shm/smartinf-tests-XXXXXX); then
  trap 'rm -rf "$SMARTINF_TEST_FOLDER"' EXIT
  if dd if=/dev/zero of="$SMARTINF_TEST_FOLDER/direct" bs=4096 count=1 oflag=direct 2>/dev/null; then
    export SMARTINF_TEST_FOLDER PYTEST_DEBUG_TEMPROOT="$SMARTINF_TEST_FOLDER"
    # Else every new device of a test would be measured for some seconds.
    printf '%s\n' "io_bytes = 4194304" "io_depth = 8" "read_bytes_per_second = 1e9" \
      "write_bytes_per_second = 1e9" >"$SMARTINF_TEST_FOLDER/smartinf.tuning"
  fi
fi
say "Running the tests"
status=0
# One more at a time than there are cores: tests of ranks and of servers wait more than they compute.
ctest --test-dir build/all -j "$(($(nproc) + 1))" --output-on-failure --no-tests=error \
  --output-junit "$PWD/build/all/tests.xml" "${ctest_options[@]}" || status=$?
python=$(sed -n 's/^SMARTINF_PYTHON:[A-Z]*=//p' build/release/CMakeCache.txt)
python3 scripts/skipped.py build/all/tests.xml "${python:-python3}" "${setup_options[@]}" || status=1
exit "$status"
