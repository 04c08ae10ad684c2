#!/usr/bin/env python3
"""The optimizer step on a remote device over loopback beside the same device opened locally, in turn.

    bench/remote_step.py --device DIR [--params 2e8] [--rounds 3] [--repeat 5] [--density 0.08]

`smartinf serve` and `smartinf bench step` share the cores of this machine. A line of JSON for each round and place: the
median seconds of gradients and update, CPU seconds a step of the client and of the server, and bytes a parameter and step that went over the
loopback interface, TCP and IP headers included (nothing else should use it meanwhile). CPU and bytes are those of a long run minus
those of a short one, so that making the state does not count; opening the device does. The state is kept below DIR and removed.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from runs import ROOT, SMARTINF

sys.path.insert(0, str(ROOT / "tests"))
from served import Authority, Server, with_environment  # pylint: disable=wrong-import-position

TICKS = os.sysconf("SC_CLK_TCK")


def loopback_bytes():
    return int(pathlib.Path("/sys/class/net/lo/statistics/tx_bytes").read_text(encoding="ascii"))


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run(args, device, repeat, server, environment):
    """Of one run of `bench step`: its row, and CPU seconds of both sides and bytes on loopback."""
    words = [args.smartinf, "bench", "step", "--params", args.params, "--device", device, "--repeat", str(repeat),
             "--threads", str(args.threads), "--json", *args.more]
    served = cpu_seconds(server.process.pid)
    wire = loopback_bytes()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        row = json.loads(process.stdout.read().splitlines()[-1])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
    return row, {"client_cpu_s": usage.ru_utime + usage.ru_stime,
                 "server_cpu_s": cpu_seconds(server.process.pid) - served, "wire": loopback_bytes() - wire}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--params", default="2e8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--smartinf", default=SMARTINF)
    parser.add_argument("more", nargs="*", help="behind --: further flags of bench step, e.g. --density 0.08")
    args = parser.parse_args()
    folder = pathlib.Path(args.device)
    folder.mkdir(parents=True, exist_ok=True)
    ratios = []
    with tempfile.TemporaryDirectory() as certificates:
        authority = Authority(args.smartinf, certificates, clients=("gpu1",))
        server = Server(authority, folder / "served", threads=args.threads, device_keys='memory_budget = "4GiB"')
        try:
            with server:
                environment = with_environment(authority.environment())
                for number in range(args.rounds):
                    seconds = {}
                    for place, device in (("local", str(folder / "local")), ("remote", server.url())):
                        _, short = run(args, device, 2, server, environment)
                        row, long = run(args, device, 2 + args.repeat, server, environment)
                        # A repetition of bench step opens the device and makes two steps.
                        counted = {name: (long[name] - short[name]) / (2 * args.repeat) for name in long}
                        counted["wire_bytes_per_param"] = counted.pop("wire") / float(args.params)
                        seconds[place] = row["gradient_s"] + row["update_s"]
                        print(json.dumps({"round": number, "place": place, **counted, **row}), flush=True)
                    ratios.append(seconds["remote"] / seconds["local"])
        finally:
            for name in ("served", "local"):
                shutil.rmtree(folder / name, ignore_errors=True)
    print(json.dumps({"remote_over_local": statistics.median(ratios), "each": [round(one, 3) for one in ratios]}))


if __name__ == "__main__":
    main()
