# shellcheck shell=bash
# Sourced by the scripts beside it: steps with a log of their own, and how they are shown.
# A step says what it does on one line; its output goes to build/logs/NAME.log, and the end of that
# log is shown when it fails.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
logs=$root/build/logs

say() { printf '%s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  shift
  local line
  for line in "$@"; do printf '  %s\n' "$line" >&2; done
  exit 1
}
usage_error() {
  printf '%s: %s (see %s --help)\n' "$(basename "$0")" "$1" "$0" >&2
  exit 2
}

step_pid=
stop_step() {
  trap - INT TERM
  if [ -n "$step_pid" ]; then
    kill -TERM -- "-$step_pid" 2>/dev/null || true
    wait "$step_pid" 2>/dev/null || true
  fi
  printf '\n%s: interrupted; run it again to go on where it stopped\n' "$(basename "$0")" >&2
  exit 130
}
trap stop_step INT TERM

# step NAME "What it does" command... : leaves the command's exit status in $?
step() {
  local what=$2 log=$logs/$1.log status=0 started=$SECONDS last
  shift 2
  mkdir -p "$logs"
  # The child gets a process group of its own, so that Ctrl-C can end all of it.
  set -m
  "$@" >"$log" 2>&1 </dev/null &
  step_pid=$!
  set +m
  if [ -t 1 ]; then
    while kill -0 "$step_pid" 2>/dev/null; do
      last=$(tail -c 400 "$log" | tr '\r' '\n' | tail -n 1 | tr -cd '[:print:]')
      printf '\r\033[K%s ... %d s  %.60s' "$what" $((SECONDS - started)) "$last"
      sleep 0.5
    done
    printf '\r\033[K'
  else
    printf '%s ...\n' "$what"
  fi
  wait "$step_pid" || status=$?
  step_pid=
  if [ "$status" -eq 0 ]; then
    printf '%s: done in %d s\n' "$what" $((SECONDS - started))
  else
    printf '%s: FAILED after %d s; the end of %s:\n' "$what" $((SECONDS - started)) "${log#"$root"/}" >&2
    tail -n 40 "$log" | sed 's/^/  | /' >&2
  fi
  return "$status"
}

# Compilers that run at once: one a core, each with 2 GB of memory (a file with torch takes that).
build_jobs() {
  local cores memory_gib jobs
  cores=$(nproc)
  memory_gib=$(awk '/^MemAvailable:/ {print int($2 / 1048576)}' /proc/meminfo)
  jobs=$((memory_gib / 2))
  [ "$jobs" -lt "$cores" ] || jobs=$cores
  [ "$jobs" -ge 1 ] || jobs=1
  echo "$jobs"
}
