#!/usr/bin/env bash
# Collects what scripts/gpu_check.sh builds with, for a machine with a GPU and without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/gpu_check_deps.sh [--python PATH] [--deepspeed] DIR

Copies the headers and libraries of installed Debian/Ubuntu packages (scripts/setup.sh installs them), the
nanobind of a Python and that Python's headers to DIR: about 10 MB, which are carried to the machine with the GPU. For
x86-64; the C library there has to be as new as here.

  --python PATH   a Python with nanobind, of the version that is there (default .venv's)
  --deepspeed     DeepSpeed with what it needs as well, to be timed beside; needs a package index
  --help          this text
TEXT
}

python=.venv/bin/python deepspeed=no dir=""
while [ $# -gt 0 ]; do
  case $1 in
    --python) [ $# -ge 2 ] || usage_error "--python needs a path"; python=$2; shift ;;
    --deepspeed) deepspeed=yes ;;
    -h | --help) help; exit 0 ;;
    -*) usage_error "unknown option '$1'" ;;
    *) dir=$1 ;;
  esac
  shift
done
[ -n "$dir" ] || usage_error "where to? name a folder"
nanobind=$("$python" -c 'import nanobind, os; print(os.path.dirname(nanobind.__file__))') ||
  fail "$python has no nanobind" "Install it there: $python -m pip install nanobind"

packages=(libfmt-dev nlohmann-json3-dev libspdlog-dev libcli11-dev libtomlplusplus-dev libxxhash-dev libhwy-dev
  liburing-dev pkgconf-bin)
[ "$deepspeed" = no ] || packages+=(libaio-dev)
depends=$(dpkg-query -W -f '${Depends}\n' "${packages[@]}" 2>&1) ||
  fail "packages are missing here" "scripts/setup.sh installs them (libaio-dev, for DeepSpeed, it does not)" "$depends"
# The libraries that the -dev packages link to.
mapfile -t libraries < <(tr ',' '\n' <<<"$depends" |
  grep -oE '^ *lib(fmt|spdlog|tomlplusplus|xxhash|hwy|uring|pkgconf|aio)[0-9][a-z0-9.]*' | tr -d ' ' | sort -u)

rm -rf "$dir"
mkdir -p "$dir/root" "$dir/python"
for package in "${packages[@]}" "${libraries[@]}"; do
  dpkg -L "$package" | grep -E '^/usr/(include|lib|share/pkgconfig|share/cmake|bin/pkgconf)' |
    while read -r path; do if [ ! -d "$path" ] || [ -L "$path" ]; then echo "$path"; fi; done
done | sort -u | tar -c --files-from - -f - 2>/dev/null | tar -x -C "$dir/root"
cp -R "$nanobind" "$dir/python/nanobind"
cp -R "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" "$dir/python-headers"
if [ "$deepspeed" = yes ]; then
  step gpu-deps-deepspeed "Fetching DeepSpeed" env DS_BUILD_OPS=0 "$python" -m pip install --no-deps --no-build-isolation \
    --target "$dir/python" deepspeed hjson py-cpuinfo || fail "DeepSpeed could not be fetched"
fi
find "$dir" -name __pycache__ -prune -exec rm -rf {} +
say "Ready: $dir ($(du -sh "$dir" | cut -f 1)). There: scripts/gpu_check.sh --deps $(basename "$dir")"
