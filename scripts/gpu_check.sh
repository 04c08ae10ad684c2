#!/usr/bin/env bash
# Builds smartinf against the torch of a machine with a GPU, without a network, then checks and times it there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/gpu_check.sh [options]

Builds the command and the Python package against the torch that is here (2.11 or newer), then runs independent
checks, the most important first: each in a process of its own, with a bound on its time. Writes a line and a row of
JSON for each as it goes, so that a run that is cut off has told what it found. About 10 minutes on 16 cores.
docs/gpu.md says how to read it.

  --quick         small models and no timing; on the test accelerator (tests/accelerator), where there is no GPU
  --out DIR       where rows.jsonl and pictures go (default build/gpu/out)
  --deps DIR      third-party headers and libraries, from scripts/gpu_check_deps.sh (default: the system's)
  --python PATH   the Python with torch (default python3)
  --build DIR     where to build (default build/gpu)
  --no-build      check what was built there before
  --only NAMES    these checks alone, separated by commas (--only help lists them)
  --seconds N     start no check later than so many seconds after the start (default 600)
  --help          this text
TEXT
}

python=python3 out="" deps="" build=$root/build/gpu builds=yes options=()
while [ $# -gt 0 ]; do
  case $1 in
    --quick) options+=(--quick) ;;
    --no-build) builds=no ;;
    --out | --deps | --python | --build | --only | --seconds)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      case $1 in
        --out) out=$2 ;;
        --deps) deps=$2 ;;
        --python) python=$2 ;;
        --build) build=$2 ;;
        *) options+=("$1" "$2") ;;
      esac
      shift ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done
mkdir -p "$build"
build=$(realpath "$build")
out=$(realpath -m "${out:-$build/out}")
command -v "$python" >/dev/null || fail "there is no Python at $python"
python=$(command -v "$python")
"$python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' ||
  fail "$python has no torch of 2.11 or newer" "Name another one with --python"

cmake_options=(-DSMARTINF_PYTHON="$python" -DSMARTINF_TORCH=ON -DSMARTINF_PYTHON_PACKAGE=ON -DSMARTINF_TESTS=OFF
  -DSMARTINF_BENCHES=OFF -DSMARTINF_GRPC=OFF -DSMARTINF_TEST_ACCELERATOR=ON)
if [ -n "$deps" ]; then
  deps=$(realpath "$deps")
  libraries=$deps/root/usr/lib/x86_64-linux-gnu
  [ -d "$libraries" ] || fail "$deps was not made by scripts/gpu_check_deps.sh"
  export SMARTINF_CHECK_DEPS=$deps
  export PYTHONPATH=$deps/python${PYTHONPATH:+:$PYTHONPATH}
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export CMAKE_PREFIX_PATH=$deps/root/usr PKG_CONFIG=$deps/root/usr/bin/pkgconf PKG_CONFIG_SYSROOT_DIR=$deps/root
  export PKG_CONFIG_LIBDIR=$libraries/pkgconfig:$deps/root/usr/share/pkgconfig
  cmake_options+=(-DCMAKE_IGNORE_PREFIX_PATH=/usr)
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    cmake_options+=(-DPython_INCLUDE_DIR="$deps/python-headers")
fi
if [ "$builds" = yes ]; then
  step gpu-configure "Configuring" cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "${cmake_options[@]}" ||
    fail "cmake could not configure $build"
  step gpu-build "Building" cmake --build "$build" -j "$(build_jobs)" \
    --target smartinf smartinf-torch smartinf_core test_accelerator || fail "the build failed"
elif [ ! -x "$build/bin/smartinf-torch" ]; then
  fail "there is no smartinf in $build" "Leave out --no-build, or name the folder of a build with --build"
fi
# The trainer finds its torch also where it was built with one at another place.
torch_libraries=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0] + "/lib")')
export LD_LIBRARY_PATH=$torch_libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} exec "$python" -uB scripts/gpu_checks/run.py \
  --build "$build" --out "$out" --since "$SECONDS" "${options[@]}"
