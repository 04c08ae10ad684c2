#!/usr/bin/env python3
"""The bytes of one step over the host link, in units of M = 2 bytes x parameters: Table I of Smart-Infinity (HPCA 2024).

    bench/traffic.py [--params 8388608] [--devices 2] [--json]

Read from the counters of `smartinf bench step`, without what is metadata. Multiples of 65536 parameters give whole numbers.
"""
import argparse
import json

from runs import rows_of

SCHEMES = {"host_update": ("host update, fp32 gradients through storage", ["--where", "host", "--spill"]),
           "smartupdate_f32": ("SmartUpdate, fp32 both ways", ["--gradient", "f32", "--weights", "f32"]),
           "smartupdate_bf16": ("SmartUpdate, bf16 both ways", [])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=1 << 23)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {"params": options.params, "devices": options.devices}
    for key, (title, flags) in SCHEMES.items():
        step = rows_of("bench", "step", "--emulated", options.devices, "--params", options.params, "--repeat", 1, *flags,
                       "--json")[0]
        moved = step["host_bytes_up"] + step["host_bytes_down"] - step["host_metadata_bytes"]
        result |= {f"{key}_m": moved / (2 * options.params), f"{key}_metadata_bytes": step["host_metadata_bytes"]}
        if not options.json:
            print(f"{title:46} {moved / (2 * options.params):6.2f} M, metadata {step['host_metadata_bytes']} bytes")
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
