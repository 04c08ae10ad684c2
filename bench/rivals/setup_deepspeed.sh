#!/usr/bin/env bash
# Makes an environment of its own for DeepSpeed, the rival of bench/compare.sh. Nothing of smartinf
# is changed, and smartinf never needs it. May be run again at any time.
#
#   bench/rivals/setup_deepspeed.sh [DIRECTORY]      default: build/rivals/deepspeed
#
# Debian packages needed: libaio-dev ninja-build g++ python3-venv (DeepSpeed compiles its I/O engine
# and its CPU optimizer when they are first used).
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-build/rivals/deepspeed}
deepspeed_version=0.19.8

missing=()
for package in libaio-dev ninja-build g++ python3-venv; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok' || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "These Debian packages are missing: ${missing[*]}"
  echo "Install them: apt-get install ${missing[*]}"
  exit 1
fi

# The torch that smartinf uses, when there is one; else pip brings its own.
ours=${VIRTUAL_ENV:-.venv}/bin/python
[ -x "$ours" ] || ours=python3
[ -x "$environment/bin/python" ] || "$ours" -m venv "$environment"
site=$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')
"$ours" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
  >"$site/torch_of_smartinf.pth" 2>/dev/null || rm -f "$site/torch_of_smartinf.pth"
"$environment/bin/python" -c 'import torch' 2>/dev/null || "$environment/bin/pip" install torch
# Its build looks at torch, so it must see this environment.
"$environment/bin/python" -c "import deepspeed; assert deepspeed.__version__ == '$deepspeed_version'" \
  2>/dev/null || {
  "$environment/bin/pip" install --quiet setuptools wheel ninja py-cpuinfo
  "$environment/bin/pip" install --quiet --no-build-isolation "deepspeed==$deepspeed_version"
}
DS_ACCELERATOR=cpu "$environment/bin/python" -c \
  'import deepspeed, torch; print("deepspeed", deepspeed.__version__, "on torch", torch.__version__)'
