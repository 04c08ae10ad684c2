"""One network trained by smartinf-gnn and by torch in memory, from the same parameters, and by torch_geometric's layers
where it is installed: losses, accuracy, seconds of an epoch, and until an accuracy: that of the last of them after --epochs,
less --within.  --sampled: smartinf-gnn as well on two servers with a thread each, on samples of one hop and 15 neighbours, where the
accuracy on the way is that on samples.

    python workloads/gnn/beside_torch.py build/release/bin/smartinf-gnn GRAPH DEVICE --model sage --hidden 128
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import torch

import reference

try:
    from torch_geometric import nn as geometric
except ImportError:
    geometric = None


class Geometric(torch.nn.Module):
    """sage and gcn of torch_geometric's layers."""

    def __init__(self, model, parameters, edges):
        super().__init__()
        self.edges, self.convolutions = edges, torch.nn.ModuleList()
        for i in range(1 + max(int(name.split(".")[1]) for name in parameters)):
            weight, bias = (parameters[f"layers.{i}.{name}"] for name in ("weight", "bias"))
            inputs = weight.shape[1] // (2 if model == "sage" else 1)
            made = (geometric.SAGEConv if model == "sage" else geometric.GCNConv)(inputs, len(weight))
            with torch.no_grad():
                if model == "sage":
                    made.lin_r.weight.copy_(weight[:, :inputs])
                    made.lin_l.weight.copy_(weight[:, inputs:])
                    made.lin_l.bias.copy_(bias)
                else:
                    made.lin.weight.copy_(weight)
                    made.bias.copy_(bias)
            self.convolutions.append(made)

    def forward(self, h):
        for i, convolution in enumerate(self.convolutions):
            h = convolution(h if i == 0 else h.relu(), self.edges)
        return h


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command")
    parser.add_argument("graph")
    parser.add_argument("device", help="directory of a new run")
    parser.add_argument("--model", default="sage")
    parser.add_argument("--layers", default="2")
    parser.add_argument("--hidden", default="64")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--more", default="", help="further flags of smartinf-gnn train")
    parser.add_argument("--beside", nargs="+", default=["torch", "torch_geometric"])
    parser.add_argument("--within", type=float, default=0.005)
    parser.add_argument("--sampled", action="store_true")
    flags = parser.parse_args()
    shape = ["--model", flags.model, "--layers", flags.layers, "--hidden", flags.hidden, "--device", flags.device, "--json"]
    shape += flags.more.split()

    def run(command, *words):
        done = subprocess.run([flags.command, command, flags.graph, *shape, *words], check=True, stdout=subprocess.PIPE, text=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    rate = ["--lr", str(flags.lr)]
    run("train", "--epochs", "0", *rate)
    start = pathlib.Path(flags.device, "start.safetensors")
    run("eval", "--parameters", str(start))
    rows = run("train", "--epochs", str(flags.epochs), *rate)
    (after,) = run("eval")
    seconds = statistics.median(row["seconds"] for row in rows)
    courses = {"smartinf-gnn": (seconds, [*(row["test"] for row in rows), after["test"]])}
    print(f"smartinf-gnn: last loss {rows[-1]['loss']:.6f}, test {after['test']:.4f}, {seconds:.2f} s an epoch")

    edges, x, y, split = reference.load_graph(flags.graph)
    parameters = reference.load_parameters(start)
    networks = {"torch": reference.Network(flags.model, parameters, edges, len(x))}
    if geometric is not None and flags.model in ("sage", "gcn"):
        networks["torch_geometric"] = Geometric(flags.model, reference.load_parameters(start), edges)
    for name, network in networks.items():
        if name not in flags.beside:
            continue
        begin = time.perf_counter()
        losses, accuracies = reference.train(network, x, y, split, flags.epochs, flags.lr)
        seconds = (time.perf_counter() - begin) / flags.epochs
        apart = max(abs(loss - row["loss"]) for loss, row in zip(losses, rows, strict=True))
        print(
            f"{name}: last loss {losses[-1]:.6f}, test {accuracies[-1]:.4f}, {seconds:.2f} s an epoch; losses at most {apart:.1e} apart"
        )
        courses[name] = (seconds, accuracies)

    if flags.sampled:
        shape[shape.index("--device") + 1] = f"{flags.device}.sampled"
        env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29607"}
        words = ["train", flags.graph, *shape, "--servers", "2", "--sample", "1", "--fanout", "15", "--threads", "1", *rate]
        words += ["--start", str(start), "--epochs", str(flags.epochs)]
        ranks = [subprocess.Popen([flags.command, *words], stdout=subprocess.PIPE, text=True, env={**env, "RANK": str(rank)})
                 for rank in range(2)]  # fmt: skip
        rows = [json.loads(line) for line in [rank.communicate()[0] for rank in ranks][0].splitlines()]
        courses["samples"] = (statistics.median(row["seconds"] for row in rows), [row["test"] for row in rows])
    target = accuracies[-1] - flags.within
    for name, (seconds, course) in courses.items():
        epochs = next((epoch for epoch, accuracy in enumerate(course) if accuracy >= target), None)
        said = f"not within {len(course) - 1}" if epochs is None else f"{epochs} epochs, {epochs * seconds:.1f} s"
        print(f"test accuracy of {target:.4f}: {name}: {said} ({seconds:.2f} s an epoch)")


if __name__ == "__main__":
    main()
