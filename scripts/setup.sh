#!/usr/bin/env bash
# Makes a fresh checkout on Debian 12 or Ubuntu 24.04 (or newer) ready: system packages, Python
# packages, build. Every part looks first and does only what is missing, so it can be run again and
# works without a network once everything is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/setup.sh [options]

Installs the missing Debian/Ubuntu packages, makes .venv with the pinned Python packages of
scripts/requirements.txt, and builds the smartinf command at build/release/bin/smartinf.

  --no-torch      build without torch: all commands work but `smartinf train`; no .venv is made
  --python PATH   use the torch of this Python instead of making .venv
  --no-system     do not check system packages (they were installed in another way)
  --no-build      install only
  --help          this text

An active virtual environment (VIRTUAL_ENV) that has torch is used instead of .venv.
Logs of every step are in build/logs/.

Examples:
  scripts/setup.sh
  scripts/setup.sh --no-torch
  scripts/setup.sh --python ~/venvs/torch/bin/python
TEXT
}

torch=yes python="" system=yes build=yes
while [ $# -gt 0 ]; do
  case $1 in
    --no-torch) torch=no ;;
    --python) [ $# -ge 2 ] || usage_error "--python needs a path"; python=$2; shift ;;
    --python=*) python=${1#*=} ;;
    --no-system) system=no ;;
    --no-build) build=no ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done

# ---- system packages -----------------------------------------------------------------------------

# True when `command --version` prints at least version $2.
has_command_version() {
  local found
  command -v "$1" >/dev/null 2>&1 || return 1
  found=$("$1" --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
  [ -n "$found" ] && [ "$(printf '%s\n%s\n' "$2" "$found" | sort -V | head -n 1)" = "$2" ]
}

# True for a Python that is new enough and can make a virtual environment.
can_make_venv() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_base_python() {
  local candidate
  for candidate in python3 /usr/bin/python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 && can_make_venv "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# The Python that the package will be built for, as far as it is there already.
package_python() {
  if [ -n "$python" ]; then
    echo "$python"
  elif [ -n "${VIRTUAL_ENV:-}" ] && has_torch "$VIRTUAL_ENV/bin/python"; then
    echo "$VIRTUAL_ENV/bin/python"
  elif [ -x .venv/bin/python ]; then
    echo .venv/bin/python
  else
    find_base_python || echo /usr/bin/python3
  fi
}

# True unless Python $1 is the system's and has no Python.h: only then does python3-dev help.
has_headers() {
  "$1" - >/dev/null 2>&1 <<'PY' || ! [[ $(readlink -f "$(command -v "$1" || echo "$1")") =~ ^/usr/bin/ ]]
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
PY
}

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing_packages() {
  # Tools may come from anywhere, as long as they are new enough.
  has_command_version cmake 3.25 || echo cmake
  command -v ninja >/dev/null 2>&1 || echo ninja-build
  [ -n "${CXX:-}" ] || has_command_version g++ 12 || echo g++
  command -v pkg-config >/dev/null 2>&1 || echo pkg-config
  command -v python3 >/dev/null 2>&1 || echo python3
  if [ "$torch" = yes ] && [ -z "$python" ] && ! [ -x .venv/bin/python ]; then
    find_base_python >/dev/null || echo python3-venv
  fi
  # Headers for the Python package; a Python from elsewhere brings its own.
  if [ "$torch" = yes ] && ! has_headers "$(package_python)"; then echo python3-dev; fi
  local package
  # ca-certificates: pip downloads over TLS. openssl: the command, for smartinf certificates.
  for package in libc6-dev liburing-dev libhwy-dev libcli11-dev libtomlplusplus-dev \
    nlohmann-json3-dev libfmt-dev libspdlog-dev libxxhash-dev libhwloc-dev libgrpc++-dev libssl-dev \
    ocl-icd-opencl-dev opencl-headers pocl-opencl-icd libgtest-dev libgmock-dev libbenchmark-dev librapidcheck-dev \
    ca-certificates openssl; do
    installed "$package" || echo "$package"
  done
}

install_system_packages() {
  if ! command -v apt-get >/dev/null 2>&1 || ! command -v dpkg-query >/dev/null 2>&1; then
    fail "this machine has no apt-get, so system packages cannot be installed here" \
      "The script knows Debian 12 and Ubuntu 24.04 or newer. Elsewhere install a C++20 compiler," \
      "cmake 3.25, ninja, pkg-config, Python 3.11 and the libraries liburing, highway, CLI11, toml++," \
      "nlohmann-json, fmt, spdlog, xxhash, hwloc, grpc++, openssl, OpenCL, googletest, google-benchmark and rapidcheck," \
      "then run: scripts/setup.sh --no-system"
  fi
  local missing as_root=() updated=no
  mapfile -t missing < <(missing_packages)
  if [ ${#missing[@]} -eq 0 ]; then
    say "System packages: all there"
    return
  fi
  say "System packages to install: ${missing[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null 2>&1 || fail "installing packages needs root, and there is no sudo here" \
      "As root run: apt-get update && apt-get install --no-install-recommends ${missing[*]}" \
      "then run this again."
    sudo -v || fail "sudo was refused; packages cannot be installed" \
      "Ask an administrator to run: apt-get install --no-install-recommends ${missing[*]}"
    as_root=(sudo)
  fi
  local get=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0)
  # Old package lists name versions the mirror may no longer have.
  if [ -z "$(find /var/lib/apt/lists -maxdepth 1 -name '*Packages*' -mtime -1 -print -quit 2>/dev/null)" ]; then
    if step apt-update "Fetching package lists" "${as_root[@]}" "${get[@]}" update; then
      updated=yes
    else
      say "Package lists could not be renewed (no network?); trying with the old ones"
    fi
  fi
  if ! step apt-install "Installing ${#missing[@]} system packages" \
    "${as_root[@]}" "${get[@]}" install --no-install-recommends "${missing[@]}"; then
    if [ "$updated" = no ] &&
      step apt-update "Fetching package lists" "${as_root[@]}" "${get[@]}" update &&
      step apt-install "Installing ${#missing[@]} system packages" \
        "${as_root[@]}" "${get[@]}" install --no-install-recommends "${missing[@]}"; then
      :
    else
      fail "system packages could not be installed" \
        "No network? Is the archive reachable (/etc/apt/sources.list, a proxy)? On Ubuntu the" \
        "'universe' component must be enabled. Without network install on another machine's mirror:" \
        "${missing[*]}"
    fi
  fi
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -eq 0 ] || fail "still missing or too old after installing: ${missing[*]}" \
    "Debian 12 and Ubuntu 24.04 have cmake >= 3.25, g++ >= 12 and Python >= 3.11; older ones do not." \
    "This is: $(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME:-unknown}")"
}

# ---- Python packages -----------------------------------------------------------------------------

# True when Python $1 has a torch whose C++ headers are there, too.
has_torch() {
  (cd / && "$1" - >/dev/null 2>&1) <<'PY'
import importlib.util, os, sys
spec = importlib.util.find_spec("torch")
header = "include/torch/csrc/api/include/torch/torch.h"
sys.exit(not (spec and os.path.exists(os.path.join(list(spec.submodule_search_locations)[0], header))))
PY
}

# Prints each pinned requirement that Python $1 lacks or has in another version.
unmet_requirements() {
  "$1" - scripts/requirements.txt <<'PY'
import importlib.metadata, sys
for line in open(sys.argv[1], encoding="utf-8"):
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, version = line.split("==")
    try:
        if importlib.metadata.version(name).split("+")[0] == version:
            continue
    except importlib.metadata.PackageNotFoundError:
        pass
    print(line)
PY
}

free_gib() { df -Pk "$1" | awk 'NR == 2 {printf "%d", $4 / 1048576}'; }

make_venv() {
  local base unmet free need_gib=9
  if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    base=$(find_base_python) || fail "no Python 3.11 or newer that can make a virtual environment" \
      "python3 here: $(python3 --version 2>&1 || true). Install python3 (>= 3.11) and python3-venv," \
      "or name one that has torch: scripts/setup.sh --python PATH"
    step venv "Making .venv with $("$base" --version 2>&1)" "$base" -m venv --clear .venv ||
      fail "the virtual environment could not be made" "Is python3-venv installed for $base?"
  fi
  unmet=$(unmet_requirements .venv/bin/python)
  if [ -z "$unmet" ]; then
    say "Python packages: all there (.venv)"
    return
  fi
  if ! has_torch .venv/bin/python; then
    free=$(free_gib .)
    [ "$free" -ge "$need_gib" ] || fail "not enough disk space for torch: $free GiB free in $root, $need_gib needed" \
      "torch and its libraries take 6 GiB, and its packages 3 GiB while they are unpacked." \
      "Make room, or use a torch that is there (--python PATH), or do without (--no-torch)."
    say "Python packages to install into .venv: torch and $(($(wc -l <<<"$unmet") - 1)) more (6 GiB; a download of about 3 GiB)"
  else
    say "Python packages to install into .venv: ${unmet//$'\n'/ }"
  fi
  # pip unpacks what it downloads under TMPDIR; /tmp is often small.
  mkdir -p build/tmp
  if ! step pip "Installing Python packages" env TMPDIR="$root/build/tmp" \
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
    -r scripts/requirements.txt; then
    fail "Python packages could not be installed" \
      "No network, or is the package index not reachable (pip config list; a proxy)? The system needs" \
      "Python 3.11 or newer on x86-64 or arm64. Run again to go on, or build without: --no-torch"
  fi
  rm -rf build/tmp
}

choose_python() {
  if [ -n "$python" ]; then
    command -v "$python" >/dev/null 2>&1 || fail "--python: there is no $python"
    python=$(command -v "$python")
    has_torch "$python" || fail "--python: $python has no torch with C++ headers" \
      "Install it there (pip install torch), or leave --python out to make .venv."
  elif [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$root/.venv" ]; then
    if has_torch "$VIRTUAL_ENV/bin/python"; then
      python=$VIRTUAL_ENV/bin/python
    else
      say "The active environment $VIRTUAL_ENV has no torch; using .venv"
    fi
  fi
  if [ -z "$python" ]; then
    make_venv
    python=$root/.venv/bin/python
  else
    local lacking
    lacking=$(cd / && "$python" -c 'import importlib.util as u
print(*[n for n in ("numpy", "safetensors", "tokenizers", "transformers", "pytest") if not u.find_spec(n)])')
    say "Using the torch of $python$([ -z "$lacking" ] || echo " (which lacks, for tests and tools: $lacking)")"
    (cd / && "$python" -c 'import nanobind' >/dev/null 2>&1) ||
      say "No Python package will be built: $python lacks nanobind ($python -m pip install nanobind, then run this again)"
  fi
}

# ---- build ---------------------------------------------------------------------------------------

build_release() {
  local with_torch=OFF log_hint="Logs: build/logs/"
  [ "$torch" = no ] || with_torch=ON
  step configure "Configuring build/release" cmake --preset release -DSMARTINF_TORCH="$with_torch" \
    ${python:+-DSMARTINF_PYTHON="$python"} || fail "cmake could not configure the build" "$log_hint"
  step build "Building smartinf" cmake --build build/release --target smartinf -j "$(build_jobs)" ||
    fail "the build failed" "$log_hint"
  say "Ready: build/release/bin/smartinf ($(build/release/bin/smartinf --version))"
}

[ "$system" = no ] || install_system_packages
[ "$torch" = no ] || choose_python
[ "$build" = no ] || build_release
