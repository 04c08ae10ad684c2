"""The networks of smartinf-gnn in plain torch, all in memory: what its losses are compared with."""

import json
import pathlib
import struct

import numpy
import torch


def load_graph(folder):
    """A graph's folder: edge_index [2, E] with each edge both ways, x [V, F], y [V], split [V] (0, 1, 2: training,
    validation, test)."""
    read = lambda name: numpy.load(pathlib.Path(folder, name))
    first = read("first.npy").astype(numpy.int64)
    target = numpy.repeat(numpy.arange(len(first) - 1), numpy.diff(first))
    edges = torch.from_numpy(numpy.stack([read("neighbours.npy").astype(numpy.int64), target]))
    arrays = [torch.from_numpy(read(name)) for name in ("features.npy", "labels.npy", "split.npy")]
    return edges, arrays[0], arrays[1].long(), arrays[2]


def load_parameters(path):
    """{name: tensor} of a safetensors file of f32."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).view(entry["shape"])
    return tensors


class Network(torch.nn.Module):
    """model: as smartinf-gnn's --model. parameters: of load_parameters()."""

    def __init__(self, model, parameters, edges, vertices):
        super().__init__()
        self.model, self.vertices = model, vertices
        self.layers = 1 + max(int(name.split(".")[1]) for name in parameters)
        self.values = torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(p) for name, p in parameters.items()})
        self.source, self.target = edges
        degree = torch.bincount(self.target, minlength=vertices)
        self.share = (1 / degree.clamp(min=1)).unsqueeze(1)
        self.scale = (degree + 1).float().rsqrt().unsqueeze(1)

    def sums(self, h):
        return torch.zeros_like(h).index_add(0, self.target, h[self.source])

    def forward(self, h):
        for i in range(self.layers):
            value = lambda name, i=i: self.values[f"layers_{i}_{name}"]
            if self.model == "gcn":
                seen = self.scale * (self.sums(self.scale * h) + self.scale * h)
            elif self.model == "mlp":
                seen = h
            else:
                seen = torch.cat([h, self.share * self.sums(h)], dim=1)
            out = torch.nn.functional.linear(seen, value("weight"), value("bias"))
            if i + 1 == self.layers:
                return out
            if self.model != "residual-sage":
                h = out.relu()
                continue
            out = torch.nn.functional.layer_norm(out, out.shape[1:], value("norm_weight"), value("norm_bias")).relu()
            h = h + out if i > 0 else out
        return h


def train(network, x, y, split, epochs, lr):
    """Losses of each epoch, with the parameters before its update; and the share of test vertices that are right, likewise
    and after the last one's."""
    optimizer = torch.optim.Adam(network.parameters(), lr=lr)
    trained, test = split == 0, split == 2
    right = lambda out: (out[test].argmax(dim=1) == y[test]).float().mean().item()
    losses, accuracies = [], []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = network(x)
        loss = torch.nn.functional.cross_entropy(out[trained], y[trained])
        loss.backward()
        losses.append(loss.item())
        accuracies.append(right(out.detach()))
        optimizer.step()
    with torch.no_grad():
        accuracies.append(right(network(x)))
    return losses, accuracies
