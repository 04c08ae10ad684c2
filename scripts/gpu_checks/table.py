"""Markdown of rows.jsonl, for docs/results/gpu.md: table.py ROWS"""

import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
said = {True: "passed", False: "failed", None: "not run"}
print("| check | result | seconds |\n|---|---|---|")
for row in rows:
    if "tokens_s" not in row:
        why = f": {row['why']}" if "why" in row else ""
        print(f"| {row['check']} | {said[row['passed']]}{why} | {row.get('seconds', '')} |")
print("\n| steps | tokens/s | step s | exposed s | GPU GB | host GB | products s | up s | down s | state s | times the largest |")
print("|---|---|---|---|---|---|---|---|---|---|---|")
for row in rows:
    if "tokens_s" in row:
        state = next((row[key] for key in ("limit_drive_s", "limit_memory_s") if key in row), "")
        print("| " + " | ".join(str(row[key]) for key in ("check", "tokens_s", "step_s", "exposed_s", "gpu_gb", "host_gb",
              "limit_products_s", "limit_link_up_s", "limit_link_down_s")) + f" | {state} | {row['times_limit']} |")  # fmt: skip
