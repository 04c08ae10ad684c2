#!/usr/bin/env bash
# Times smartinf's optimizer step and DeepSpeed ZeRO-Infinity's in turn, on one drive, and writes a
# page with the commands, the machine and the medians, and every row into RESULT.jsonl beside it.
#
#   bench/compare.sh DIRECTORY [RESULT.md]
#
#   PARAMS=2e8       parameters           ROUNDS=5    how often the two take turns
#   REPEAT=3         steps in a round     FORMATS="f32 q8"
#   SMARTINF=build/release/bin/smartinf   DEEPSPEED=build/rivals/deepspeed
#
# Set the rival up first: bench/rivals/setup_deepspeed.sh
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
drive=${1:?usage: bench/compare.sh DIRECTORY [RESULT.md]}
result=${2:-$here/build/compare.md}
params=${PARAMS:-2e8} rounds=${ROUNDS:-5} repeat=${REPEAT:-3} formats=${FORMATS:-f32 q8}
smartinf=${SMARTINF:-$here/build/release/bin/smartinf}
deepspeed=${DEEPSPEED:-$here/build/rivals/deepspeed}
for needed in "$smartinf" "$deepspeed/bin/python"; do
  [ -x "$needed" ] || { echo "missing: $needed (scripts/setup.sh, bench/rivals/setup_deepspeed.sh)"; exit 1; }
done
mkdir -p "$drive" "$(dirname "$result")"
rows=$(mktemp) && trap 'rm -f "$rows"; rm -rf "$drive/deepspeed"' EXIT

for round in $(seq "$rounds"); do
  for format in $formats; do
    "$smartinf" bench step --params "$params" --device "$drive/smartinf" --repeat "$repeat" \
      --state-format "$format" --json | tail -n 1 | sed "s/^{/{\"round\":$round,\"who\":\"smartinf $format\",/" >>"$rows"
  done
  mkdir -p "$drive/deepspeed"
  "$deepspeed/bin/python" "$here/bench/rivals/deepspeed_step.py" --params "$params" \
    --device "$drive/deepspeed" --repeat "$repeat" 2>/dev/null |
    grep '^{' | tail -n 1 | sed "s/^{/{\"round\":$round,\"who\":\"deepspeed\",/" >>"$rows"
  rm -rf "$drive/deepspeed"
  tail -n "$(($(wc -w <<<"$formats") + 1))" "$rows" | cut -c 1-160
done

PARAMS=$params ROUNDS=$rounds REPEAT=$repeat FORMATS=$formats python3 - "$rows" "$drive" "${result%.md}.jsonl" >"$result" <<'PYTHON'
import json, os, platform, shlex, statistics, subprocess, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
drive = sys.argv[2]
by_who = {}
for row in rows:
    by_who.setdefault(row["who"], []).append(row)


def said(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()


print("# The optimizer step: smartinf and DeepSpeed ZeRO-Infinity, in turn\n")
settings = [f"{key}={shlex.quote(os.environ[key])}" for key in ("PARAMS", "ROUNDS", "REPEAT", "FORMATS")]
print(f"Command: `{' '.join(settings)} bench/compare.sh DIR`\n")
cpu = said("lscpu | sed -n 's/^Model name: *//p'")
print(f"Machine: {os.cpu_count()} cores of {cpu}, {said('free -h | awk ' + chr(39) + 'NR==2{print $2}' + chr(39))} memory, "
      f"Linux {platform.release()}, {said('df --output=fstype ' + drive + ' | tail -1')}; "
      f"load at the end {os.getloadavg()[0]:.1f}.\n")
rival = by_who.get("deepspeed", [{}])[0]
print(f"Rival: DeepSpeed {rival.get('version')} on torch {rival.get('torch')}, stage 3, optimizer state on "
      "storage, configuration in bench/rivals/deepspeed_step.py. smartinf: durable steps, checksums on, "
      "512 MiB for the engine.\n")
print("| program | median s | min | max | share of the drive's limit | peak memory GB | times as fast as DeepSpeed |")
print("|---|---|---|---|---|---|---|")
base = statistics.median(r["update_s"] for r in by_who["deepspeed"]) if "deepspeed" in by_who else None
for who, group in by_who.items():
    times = [r["update_s"] for r in group]
    shares = [r["share_of_limit"] for r in group if "share_of_limit" in r]
    share = f"{statistics.median(shares):.2f}" if shares else ""
    memory = max(r["rss_peak_bytes"] for r in group) / 1e9
    faster = f"{base / statistics.median(times):.2f}" if base else ""
    print(f"| {who} | {statistics.median(times):.3f} | {min(times):.3f} | {max(times):.3f} | {share} | "
          f"{memory:.2f} | {faster} |")
name = os.path.basename(sys.argv[3])
print(f"\nThe rows behind this page, each the median of its round's steps, are in [{name}]({name}).")
with open(sys.argv[3], "w", encoding="utf-8") as out:
    for row in rows:
        out.write(json.dumps(row) + "\n")
PYTHON
echo "written: $result and ${result%.md}.jsonl"
