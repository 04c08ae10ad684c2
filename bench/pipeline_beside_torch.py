"""The period of torch's Schedule1F1B over links of limited rate, where computing sleeps, and of our stages (rank_worker).

Each rank is a process in a network namespace of its own; every two are joined by a veth pair whose ends send at the
rate (tc tbf). Forward sleeps F, backward 2 F, and messages have the bytes that take c = share x 3 F on the link. The
period is what a micro batch more costs: the slope of a step's time between two numbers of micro batches. Needs root.

    python3 bench/pipeline_beside_torch.py --ranks 2 3 --worker build/release/bin/rank_worker > rows.jsonl
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

FORWARD_S = 0.04
BACKWARD_S = 2 * FORWARD_S
COUNTS = (8, 20)  # of micro batches
BURST_BYTES = 64 << 10


def address(rank):
    return f"10.78.0.{rank + 1}"


class Links:
    """Namespaces, each with an address that the others reach over links of their own."""

    def __init__(self, ranks, bits_per_s):
        self.names = [f"smartinf-pipe-{os.getpid()}-{rank}" for rank in range(ranks)]
        self.bits_per_s = bits_per_s

    def __enter__(self):
        run = lambda *words: subprocess.run(["ip", *words], check=True)
        for name in self.names:
            run("netns", "add", name)
            run("-n", name, "link", "set", "lo", "up")
        for a in range(len(self.names)):
            for b in range(a + 1, len(self.names)):
                ends = ((a, f"to{b}", b), (b, f"to{a}", a))
                run("link", "add", ends[0][1], "netns", self.names[a], "type", "veth", "peer", "name", ends[1][1],
                    "netns", self.names[b])
                for here, device, there in ends:
                    on = ("-n", self.names[here])
                    run(*on, "address", "add", address(here) + "/32", "dev", device)
                    run(*on, "link", "set", device, "up")
                for here, device, there in ends:
                    run("-n", self.names[here], "route", "add", address(there), "dev", device, "src", address(here))
                    subprocess.run(["tc", "-n", self.names[here], "qdisc", "add", "dev", device, "root", "tbf", "rate",
                                    f"{int(self.bits_per_s)}bit", "burst", str(BURST_BYTES), "latency", "2s"],
                                   check=True)
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def on(self, rank):
        """What stands before a command that runs there."""
        return ["ip", "netns", "exec", self.names[rank]]

    def sent_bytes(self, rank):
        """That went out of its namespace to all others, headers included."""
        files = [f"/sys/class/net/to{other}/statistics/tx_bytes" for other in range(len(self.names)) if other != rank]
        out = subprocess.run([*self.on(rank), "cat", *files], check=True, capture_output=True, text=True).stdout
        return sum(map(int, out.split()))

    def payload_bytes(self, rank, seen):
        """Payload that its open sockets have brought to the others, without headers and repetitions, by socket; seen: what an
        earlier call returned."""
        out = subprocess.run([*self.on(rank), "ss", "-tinHO"], check=True, capture_output=True, text=True).stdout
        for line in out.splitlines():
            here, there = line.split()[3:5]
            if sent := re.search(r"bytes_acked:(\d+)", line):
                if not there.startswith(address(rank)):
                    seen[here, there] = max(seen.get((here, there), 0), int(sent[1]))
        return seen

    def measured_rate(self, bytes_each=4 << 20):
        """Bytes per second of a plain socket between the first two."""
        code = ("import socket,sys,time\n"
                "s=socket.create_server(('0.0.0.0',7000)); print('up',flush=True); c,_=s.accept(); n=0; t=None\n"
                "while (d:=c.recv(1<<20)):\n"
                "    t=t or time.monotonic(); n+=len(d)\n"
                "print(n/(time.monotonic()-t))")
        server = subprocess.Popen([*self.on(1), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        server.stdout.readline()
        send = f"import socket\ns=socket.create_connection(('{address(1)}',7000)); s.sendall(bytes({bytes_each}))"
        subprocess.run([*self.on(0), sys.executable, "-c", send], check=True)
        return float(server.communicate()[0])


def run_ranks(links, argv):
    ranks = len(links.names)
    processes = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": address(0),
               "MASTER_PORT": "29600", "GLOO_SOCKET_IFNAME": f"to{1 if rank == 0 else 0}", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen([*links.on(rank), *argv], env=env, stdout=subprocess.PIPE, text=True))
    out = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        codes = [process.returncode for process in processes]
        raise SystemExit(f"{' '.join(map(str, argv))}: exit codes {codes}, what ranks printed: {out}")
    return out[0]


def torch_rank(elements, repeats):
    """One rank: prints a step's seconds for each number of micro batches, as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            time.sleep(FORWARD_S)
            return x + weight

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(BACKWARD_S)
            return gradient.contiguous(), gradient.sum()

    class Stage(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return Sleeps.apply(x, self.weight)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seconds = {}
    for count in COUNTS:
        stage = PipelineStage(Stage(), rank, ranks, torch.device("cpu"))
        schedule = Schedule1F1B(stage, count, loss_fn=lambda y, target: y.sum())
        batch = torch.zeros(count, elements)
        took = []
        for step in range(1 + repeats):
            dist.barrier()
            began = time.monotonic()
            if rank == 0:
                schedule.step(batch)
            elif rank == ranks - 1:
                schedule.step(target=batch)
            else:
                schedule.step()
            dist.barrier()
            if step > 0:
                took.append(time.monotonic() - began)
        seconds[count] = statistics.median(took)
    if rank == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


def worker_step(links, worker, count, message_bytes, repeats):
    """Median seconds of a step of our stages."""
    said = run_ranks(links, [worker, "60000", str(1 + repeats), "pipeline", str(round(1e3 * FORWARD_S)),
                             str(round(1e3 * BACKWARD_S)), str(message_bytes // 2), "1", str(count)])
    return statistics.median([float(line) for line in said.split()[:-1]][1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.25, 0.5, 1])
    parser.add_argument("--rate", type=float, default=2e8, help="bits per second of each link and direction")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help="rank_worker of the build; none: torch alone")
    parser.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.torch_rank is not None:
        return torch_rank(arguments.torch_rank, arguments.repeats)
    computes = FORWARD_S + BACKWARD_S
    for ranks in arguments.ranks:
        with Links(ranks, arguments.rate) as links:
            rate = links.measured_rate()
            for share in arguments.shares:
                elements = max(1, int(share * computes * rate / 4))
                said = json.loads(run_ranks(links, [sys.executable, os.path.abspath(__file__), "--torch-rank",
                                                    str(elements), "--repeats", str(arguments.repeats)]))
                steps = {"torch Schedule1F1B": [said[str(count)] for count in COUNTS]}
                if arguments.worker:
                    steps["smartinf"] = [worker_step(links, arguments.worker, count, 4 * elements, arguments.repeats)
                                         for count in COUNTS]
                for program, (few, many) in steps.items():
                    period = (many - few) / (COUNTS[1] - COUNTS[0])
                    print(json.dumps({"program": program, "ranks": ranks, "c_of_compute": share,
                                      "message_bytes": 4 * elements, "link_bytes_per_s": round(rate),
                                      "forward_s": FORWARD_S, "backward_s": BACKWARD_S,
                                      "step_s": {str(COUNTS[0]): round(few, 3), str(COUNTS[1]): round(many, 3)},
                                      "period_of_compute": round(period / computes, 3)}), flush=True)


if __name__ == "__main__":
    main()
