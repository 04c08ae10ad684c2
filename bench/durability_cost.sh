#!/usr/bin/env bash
# What durable steps and checksums cost: the optimizer step as it is by default and with
# durability "none" and no checksums, in turn on one drive, each beside the drive's time for the same
# bytes. Writes a page with the command, the machine and the medians, and every row into RESULT.jsonl beside it.
#
#   bench/durability_cost.sh DIRECTORY [RESULT.md]
#
#   PARAMS=1e8   parameters     ROUNDS=7   rounds in which the two take turns     REPEAT=3   steps in a round
#   SMARTINF=build/release/bin/smartinf
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
drive=${1:?usage: bench/durability_cost.sh DIRECTORY [RESULT.md]}
result=${2:-$here/build/durability_cost.md}
params=${PARAMS:-1e8} rounds=${ROUNDS:-7} repeat=${REPEAT:-3}
smartinf=${SMARTINF:-$here/build/release/bin/smartinf}
[ -x "$smartinf" ] || { echo "missing: $smartinf (scripts/setup.sh builds it)"; exit 1; }
mkdir -p "$drive" "$(dirname "$result")"
rows=$(mktemp) && trap 'rm -f "$rows"' EXIT

step() { # NAME FLAGS...
  local name=$1
  shift
  "$smartinf" bench step --params "$params" --device "$drive/state" --repeat "$repeat" --json "$@" |
    tail -n 1 | sed "s/^{/{\"round\":$round,\"who\":\"$name\",/" | tee -a "$rows" | cut -c 1-100
}
for round in $(seq "$rounds"); do
  # The one that goes first changes from round to round.
  if [ $((round % 2)) -eq 1 ]; then
    step default
    step bare --durability none --no-checksums
  else
    step bare --durability none --no-checksums
    step default
  fi
done

PARAMS=$params ROUNDS=$rounds REPEAT=$repeat python3 - "$rows" "$drive" "${result%.md}.jsonl" >"$result" <<'PYTHON'
import json, os, platform, statistics, subprocess, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
drive = sys.argv[2]


def said(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()


def of(who, key):
    return [row[key] for row in rows if row["who"] == who]


print("# What durable steps and checksums cost\n")
settings = " ".join(f"{key}={os.environ[key]}" for key in ("PARAMS", "ROUNDS", "REPEAT"))
print(f"Command: `{settings} bench/durability_cost.sh DIR`\n")
cpu = said("lscpu | sed -n 's/^Model name: *//p'")
print(f"Machine: {os.cpu_count()} cores of {cpu}, "
      f"Linux {platform.release()}, {said('df --output=fstype ' + drive + ' | tail -1')}; "
      f"load at the end {os.getloadavg()[0]:.1f}.\n")
print("*default*: every step survives power loss (two slots, prepared and committed), and every block has a "
      "checksum. *bare*: `--durability none --no-checksums`, so state is overwritten in place. The drive's limit "
      "is the time that it needs for the same bytes without computing, measured in turn with the steps.\n")
print("| options | median s | min | max | share of the drive's limit |")
print("|---|---|---|---|---|")
for who in ("default", "bare"):
    times = of(who, "update_s")
    print(f"| {who} | {statistics.median(times):.3f} | {min(times):.3f} | {max(times):.3f} | "
          f"{statistics.median(of(who, 'share_of_limit')):.3f} |")
ratios = [d / b for d, b in zip(of("default", "update_s"), of("bare", "update_s"))]
cost = statistics.median(of("default", "update_s")) / statistics.median(of("bare", "update_s"))
print(f"\nThe median of *default* beside that of *bare*: {100 * (cost - 1):+.1f} %; in the single rounds "
      f"{', '.join(f'{100 * (ratio - 1):+.1f}' for ratio in ratios)} %, median "
      f"{100 * (statistics.median(ratios) - 1):+.1f} %.")
name = os.path.basename(sys.argv[3])
print(f"\nThe rows behind this page, each the median of its round's steps, are in [{name}]({name}).")
with open(sys.argv[3], "w", encoding="utf-8") as out:
    for row in rows:
        out.write(json.dumps(row) + "\n")
PYTHON
sed -n '/^| options/,/^The median/p' "$result"
echo "written: $result and ${result%.md}.jsonl"
