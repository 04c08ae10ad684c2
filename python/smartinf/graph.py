"""Features of a graph's vertices on devices, for torch_geometric's loaders (docs/graph.md)."""

import json
import threading
import warnings

import numpy
import torch
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.sampler import NeighborSampler as _NeighborSampler
from torch_geometric.sampler.base import SubgraphType

from smartinf import _core, open_optimizers
from smartinf.errors import UsageError
from smartinf.layout import TYPE_NAMES
from smartinf.sizes import parse_bytes
from smartinf.storage_options import Devices, Size, device_list

__all__ = ["FeatureStore", "NeighborSampler"]

_ROWS_AT_ONCE = 1 << 14  # that are written to devices in one call
_BLOCK_ELEMENTS = 1 << 16  # of state, the least a device can hold
_BLOCKS_OF_DEVICE = 4  # rows are shared out as blocks of state are
_OTHER_MEMORY = 64 << 20  # of the devices' buffers for state, which is not used


class FeatureStore(_FeatureStore):
    """A torch_geometric.data.FeatureStore whose tensors have their rows on devices: a batch reads the rows that it asks
    for, those that come often from a cache.

    devices: as of an optimizer. A store that is there already is opened, and `tensors` left out.
    tensors: of a new store, {(group, name): [rows, columns] or [rows]}: torch tensors or numpy arrays (numpy.memmap as
        well, which is read some rows at a time) of float32, float16 or bfloat16; rows come back as what they are.
        A key that is a name alone belongs to group None.
    memory: bytes for where rows are and for the cache, of all devices together.

    get_tensor() takes an index as torch_geometric does: ids of any number and order, a slice, or none for all rows.
    Tensors are read only; what is written once stays until the folders are deleted. Ids of a row that is not there are
    refused with their place. One process has the devices; a loader's workers ask the one that made them.
    Errors: UsageError for tensors of other types and shapes, and where `tensors` is given for devices that have some,
    or left out for empty ones; NoSpaceError with what is needed and free."""

    def __init__(self, devices: Devices, tensors: dict | None = None, *, memory: Size = "256MiB"):
        super().__init__()
        paths = device_list(devices)
        stored = _core.stored_state([device["path"] for device in paths])
        if stored is None:
            if not tensors:
                raise UsageError(f"{paths[0]['path']} has no features yet: give tensors={{(group, name): values}}")
            kinds = [_kind(key, values) for key, values in tensors.items()]
        else:
            name = stored[0][0][0]
            if not name.startswith("["):
                raise UsageError(f"{paths[0]['path']} holds the state of an optimizer, not features; name another folder")
            if tensors:
                raise UsageError(f"{paths[0]['path']} holds features already; leave tensors out, or name another folder")
            kinds = json.loads(name)
        elements = _BLOCKS_OF_DEVICE * len(paths) * _BLOCK_ELEMENTS
        options = {
            "devices": [{"bandwidth": 1.0, **device} for device in paths],
            "memory_budget_bytes": _OTHER_MEMORY,
            "subgroup_elements": _BLOCK_ELEMENTS,
            "io_bytes": 1 << 20,
            "io_depth": 8,
            "table_memory_bytes": parse_bytes(memory, "memory"),
            "tables": [
                {"name": f"{group}/{name}", "rows": shape[0], "dim": shape[1] if shape[1:] else 1, "kind": "data"}
                for group, name, shape, _ in kinds
            ],
        }  # fmt: skip
        # The description is the name of the only parameter, which has a block for each device and is never trained.
        with open_optimizers.named_when_busy(paths):
            self._core = _core.Updater(options, [json.dumps(kinds)], [[elements]])
        self._turn = threading.Lock()
        self._kinds = {(group, name): (i, tuple(shape), getattr(torch, kind)) for i, (group, name, shape, kind) in enumerate(kinds)}
        if self._core.fresh():
            for (_, _, shape, _), values, i in zip(kinds, tensors.values(), range(len(kinds)), strict=True):
                self._put(i, values, shape[0])
            nothing = torch.zeros(elements)
            self._core.initialize(lambda _: (nothing.data_ptr(), "f32"), "")

    def _put(self, table, values, rows):
        for first in range(0, rows, _ROWS_AT_ONCE):
            some = torch.as_tensor(numpy.array(values[first : first + _ROWS_AT_ONCE]) if isinstance(values, numpy.ndarray)
                                   else values[first : first + _ROWS_AT_ONCE].cpu()).to(torch.float32).contiguous()  # fmt: skip
            ids = torch.arange(first, first + len(some))
            self._core.put_rows(table, ids.data_ptr(), len(ids), some.data_ptr())

    def prefetch(self, group, name, index):
        """Reads rows into the cache meanwhile: those of a batch that will come. Returns at once."""
        table, _, _ = self._find(TensorAttr(group, name))
        ids = torch.as_tensor(index, dtype=torch.int64).contiguous()
        with self._turn:
            self._core.prefetch_rows(table, ids.data_ptr(), len(ids))

    def close(self):
        """Closes the devices, which can then be opened again."""
        with self._turn:
            self._core.close()

    def _find(self, attr):
        found = self._kinds.get((attr.group_name if attr.is_set("group_name") else None, attr.attr_name))
        if found is None:
            raise KeyError(f"no tensor {attr.group_name}, {attr.attr_name}; there are {', '.join(map(str, self._kinds))}")
        return found

    # ---- What torch_geometric asks for.

    def _get_tensor(self, attr):
        table, shape, dtype = self._find(attr)
        index = attr.index if attr.is_set("index") else None
        if index is None or isinstance(index, slice):
            index = torch.arange(shape[0])[index or slice(None)]
        elif isinstance(index, int):
            index = torch.tensor([index])
        else:
            index = torch.as_tensor(index)
        if index.dtype == torch.bool:
            index = index.nonzero().view(-1)
        ids = index.to("cpu", torch.int64).contiguous()
        out = torch.empty(len(ids), *shape[1:], dtype=dtype)
        with self._turn:
            self._core.gather_rows(table, ids.data_ptr(), len(ids), TYPE_NAMES[dtype], out.data_ptr(), False)
        return out

    def _get_tensor_size(self, attr):
        return self._find(attr)[1]

    def get_all_tensor_attrs(self):
        return [TensorAttr(group, name) for group, name in self._kinds]

    def _put_tensor(self, tensor, attr):
        raise UsageError("features are read only; give all tensors when the store is made")

    def _remove_tensor(self, attr):
        raise UsageError("features are read only; delete the devices' folders with all of them")


def _kind(key, values):
    group, name = key if isinstance(key, tuple) else (None, key)
    dtype = values.dtype if isinstance(values, torch.Tensor) else getattr(torch, str(values.dtype), None)
    if dtype not in TYPE_NAMES:
        raise UsageError(f"{name} is {values.dtype}; known are float32, bfloat16 and float16")
    if values.ndim not in (1, 2) or 0 in values.shape:
        raise UsageError(f"{name} is of shape {tuple(values.shape)}; [rows, columns] or [rows] is needed, neither of them 0")
    return [group, name, list(values.shape), str(dtype).removeprefix("torch.")]


class NeighborSampler(_NeighborSampler):
    """torch_geometric's NeighborSampler, which draws with torch alone: NeighborLoader and LinkNeighborLoader take it as
    `neighbor_sampler` and then need neither pyg-lib nor torch-sparse.

    Arguments are those of torch_geometric.sampler.NeighborSampler. A vertex brings in num_neighbors[hop] of its neighbours,
    uniformly, each at most once or with replace=True any number of times; -1: all. torch's seed decides.
    Errors: UsageError for times, weights, disjoint and induced samples and those that follow edges, which need pyg-lib."""

    def __init__(self, data, num_neighbors, *args, **kwargs):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without a 'pyg-lib' installation")
            super().__init__(data, num_neighbors, *args, **kwargs)
        refused = {"times": self.is_temporal, "weights": self.edge_weight is not None, "disjoint samples": self.disjoint,
                   "induced samples": self.subgraph_type == SubgraphType.induced,
                   "samples that follow edges": self.sample_direction == "backward"}  # fmt: skip
        if any(refused.values()):
            asked = ", ".join(name for name, is_asked in refused.items() if is_asked)
            raise UsageError(f"this sampler has no {asked}; use torch_geometric's with pyg-lib")

    def _sample(self, seed, seed_time=None, **kwargs):
        if isinstance(seed, dict):
            fanouts = self.num_neighbors.get_mapped_values(self.edge_types)
            types = [(self.to_edge_type[rel], self.colptr_dict[rel], self.row_dict[rel], fanouts[rel]) for rel in self.colptr_dict]
        else:
            seed = {None: seed}
            types = [((None, None, None), self.colptr, self.row, self.num_neighbors.get_mapped_values())]
        kinds = self.node_types if self.is_hetero else [None]
        node = {kind: seed.get(kind, torch.empty(0)).to(torch.int64) for kind in kinds}
        sampled_nodes = {kind: [len(ids)] for kind, ids in node.items()}
        drawn = {edge_type: [] for edge_type, *_ in types}  # of each hop: (neighbours, places of their vertices, edges)
        begin = dict.fromkeys(node, 0)  # where the vertices of the last hop begin
        for hop in range(self.num_neighbors.num_hops):
            come = {kind: [] for kind in node}
            for edge_type, colptr, row, fanout in types:
                source, _, target = edge_type
                of, edge = _draw(colptr, node[target][begin[target] :], fanout[hop], self.replace)
                drawn[edge_type].append((row[edge], of + begin[target], edge))
                come[source].append(drawn[edge_type][-1][0])
            for kind, ids in come.items():
                begin[kind] = len(node[kind])
                fresh = torch.cat([node[kind][:0], *ids]).unique()
                node[kind] = torch.cat([node[kind], fresh[~torch.isin(fresh, node[kind])]])
                sampled_nodes[kind].append(len(node[kind]) - begin[kind])
        row, col, edge = {}, {}, {}
        order = {kind: ids.argsort(stable=True) for kind, ids in node.items()}
        for edge_type, hops in drawn.items():
            ids, col[edge_type], edge[edge_type] = (torch.cat(parts) for parts in zip(*hops, strict=True))
            source = edge_type[0]
            row[edge_type] = order[source][torch.searchsorted(node[source][order[source]], ids)]
        sampled_edges = {edge_type: [len(ids) for ids, _, _ in hops] for edge_type, hops in drawn.items()}
        if None in node:
            one = types[0][0]
            return SamplerOutput(node[None], row[one], col[one], edge[one], None, sampled_nodes[None], sampled_edges[one])
        return HeteroSamplerOutput(node, row, col, edge, None, sampled_nodes, sampled_edges)


def _draw(colptr, ids, fanout, replace):
    """Edges of `ids`, at most `fanout` of each: (places in ids, edges), both [drawn]."""
    first = colptr[ids]
    degree = colptr[ids + 1] - first
    if fanout < 0:
        of = torch.arange(len(ids)).repeat_interleave(degree)
        return of, torch.arange(len(of)) + (first - (degree.cumsum(0) - degree))[of]
    place = torch.arange(fanout).expand(len(ids), fanout).clone()
    if replace:
        place = (torch.rand(place.shape, dtype=torch.float64) * degree[:, None]).long()
        there = (degree > 0)[:, None].expand_as(place)
    else:
        there = place < degree[:, None]
        many = degree > fanout
        least = degree[many] - fanout
        some = place[many]
        for i in range(fanout):  # Floyd's: each subset of that size is as likely as any other
            last = least + i
            at = (torch.rand(len(last), dtype=torch.float64) * (last + 1)).long()
            some[:, i] = torch.where((some[:, :i] == at[:, None]).any(1), last, at)
        place[many] = some
    of = torch.arange(len(ids))[:, None].expand_as(place)[there]
    return of, (first[:, None] + place)[there]
