"""Features on devices: smartinf.graph.FeatureStore, read as torch_geometric's loaders read it."""

import numpy
import pytest
import torch

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.loader.utils import filter_custom_store
from torch_geometric.testing import MyGraphStore

import smartinf
from smartinf.graph import FeatureStore, NeighborSampler

ROWS = 3001


def tensors():
    generator = torch.Generator().manual_seed(2)
    return {
        (None, "x"): torch.randn(ROWS, 20, generator=generator),
        ("paper", "h"): torch.randn(500, 6, generator=generator).to(torch.bfloat16),
        ("paper", "weight"): torch.randn(500, generator=generator).to(torch.float16),
    }


@pytest.mark.parametrize("devices", [1, 3])
def test_rows_come_as_they_were_given(tmp_path, devices):
    given = tensors()
    paths = [tmp_path / str(i) for i in range(devices)]
    store = FeatureStore(paths, given, memory="64MiB")
    for again in (False, True):
        if again:
            store.close()
            store = FeatureStore(paths, memory="64MiB")
        for (group, name), values in given.items():
            ids = torch.tensor([3, 499, 3, 0, 77])
            store.prefetch(group, name, ids)
            for index in (ids, None, slice(5, 60)):
                got = store.get_tensor(TensorAttr(group, name, index))
                wanted = values if index is None else values[index]
                assert got.dtype == values.dtype and torch.equal(got, wanted)
            assert store.get_tensor_size(TensorAttr(group, name)) == values.shape
        assert len(store.get_all_tensor_attrs()) == 3
    store.close()


def test_a_loaders_batch_has_its_rows(tmp_path):
    x = tensors()[None, "x"].numpy()
    numpy.save(tmp_path / "x.npy", x)
    store = FeatureStore(tmp_path / "device", {"x": numpy.load(tmp_path / "x.npy", mmap_mode="r")}, memory="64MiB")
    graph = MyGraphStore()
    graph.put_edge_index((torch.tensor([0, 1]), torch.tensor([1, 2])), None, "coo", size=(ROWS, ROWS))
    node = torch.tensor([2000, 5, 7])
    batch = filter_custom_store(store, graph, node, torch.tensor([0, 1]), torch.tensor([1, 2]), None, Data)
    assert torch.equal(batch.x, torch.from_numpy(x)[node])
    store.close()


def random_edges(sources, targets, count, seed):
    generator = torch.Generator().manual_seed(seed)
    skewed = torch.rand(count, generator=generator) ** 3
    return torch.stack([(skewed * sources).long(), torch.randint(targets, (count,), generator=generator)])


def edges_of(batch, edge_index, row_ids, col_ids):
    """The batch's edges as the graph numbers them, which have to be the graph's."""
    local = batch.edge_index
    assert torch.equal(edge_index[:, batch.e_id], torch.stack([row_ids[local[0]], col_ids[local[1]]]))
    return batch.e_id


@pytest.mark.parametrize("fanout", [[3, 2], [-1, -1]])
def test_a_neighbor_loader_reads_from_devices(tmp_path, fanout):
    x = tensors()[None, "x"]
    edge_index = random_edges(ROWS, ROWS, 20_000, 1)
    store = FeatureStore(tmp_path / "device", {"x": x}, memory="64MiB")
    graph = MyGraphStore()
    graph.put_edge_index(edge_index, None, "coo", size=(ROWS, ROWS))
    degree = torch.bincount(edge_index[1], minlength=ROWS)
    data = (store, graph)
    loader = NeighborLoader(data, fanout, neighbor_sampler=NeighborSampler(data, fanout), input_nodes=torch.arange(0, 90), batch_size=30)
    batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert torch.equal(batch.x, x[batch.n_id]) and len(batch.n_id.unique()) == len(batch.n_id)
        seeds, hop = batch.num_sampled_nodes[:2]
        assert seeds == 30 and sum(batch.num_sampled_nodes) == len(batch.n_id)
        e_id = edges_of(batch, edge_index, batch.n_id, batch.n_id)
        assert len(e_id.unique()) == len(e_id)
        # Of each vertex as many as it has, or as were asked for.
        drawn = torch.bincount(batch.edge_index[1], minlength=len(batch.n_id))
        for ids, most in ((slice(0, seeds), fanout[0]), (slice(seeds, seeds + hop), fanout[1])):
            has = degree[batch.n_id[ids]]
            assert torch.equal(drawn[ids], has if most < 0 else has.clamp(max=most))
        assert drawn[seeds + hop :].sum() == 0
    links = LinkNeighborLoader(data, fanout, neighbor_sampler=NeighborSampler(data, fanout), edge_label_index=(None, edge_index[:, :40]), batch_size=40)
    batch = next(iter(links))
    assert torch.equal(batch.n_id[batch.edge_label_index], edge_index[:, :40])
    store.close()


def test_graphs_of_several_kinds_are_sampled():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.arange(300.0)[:, None], torch.arange(100.0)[:, None]
    kinds = {("author", "writes", "paper"): random_edges(100, 300, 900, 2), ("paper", "cites", "paper"): random_edges(300, 300, 2000, 3),
             ("paper", "by", "author"): random_edges(300, 100, 900, 4)}  # fmt: skip
    for kind, edge_index in kinds.items():
        data[kind].edge_index = edge_index
    fanout = {kind: [2, 3] for kind in kinds}
    sampler = NeighborSampler(data, fanout)
    batch = next(iter(NeighborLoader(data, fanout, neighbor_sampler=sampler, input_nodes=("paper", torch.arange(40)), batch_size=40)))
    for kind in ("paper", "author"):
        assert torch.equal(batch[kind].x[:, 0].long(), batch[kind].n_id)
    for kind, edge_index in kinds.items():
        assert len(edges_of(batch[kind], edge_index, batch[kind[0]].n_id, batch[kind[2]].n_id)) > 0
    # The first hop's edges of the seeds, and the second hop's of the authors that they brought.
    for kind, count, most in ((("paper", "cites", "paper"), 40, 2), (("paper", "by", "author"), batch["author"].num_sampled_nodes[1], 3)):
        drawn = torch.bincount(batch[kind].edge_index[1], minlength=count)[:count]
        has = torch.bincount(kinds[kind][1], minlength=300)[batch[kind[2]].n_id[:count]]
        assert torch.equal(drawn, has.clamp(max=most))


def test_neighbours_are_drawn_uniformly_and_by_torchs_seed():
    data = Data(edge_index=torch.stack([torch.arange(1, 8), torch.zeros(7, dtype=torch.int64)]), num_nodes=8)
    seed = torch.zeros(1, dtype=torch.int64)
    torch.manual_seed(3)
    counts = torch.zeros(7)
    pairs = set()
    sampler = NeighborSampler(data, [3])
    for _ in range(4000):
        out = sampler._sample(seed)
        counts[out.edge] += 1
        pairs.add(tuple(sorted(out.edge.tolist())))
    assert len(pairs) == 35
    # 4000 x 3 / 7 each, within five standard deviations of 31.
    assert (counts - 4000 * 3 / 7).abs().max() < 5 * (4000 * 3 / 7 * 4 / 7) ** 0.5
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append(NeighborSampler(data, [9], replace=True)._sample(seed).edge)
    assert torch.equal(*draws) and len(draws[0]) == 9
    with pytest.raises(smartinf.UsageError, match="disjoint"):
        NeighborSampler(data, [3], disjoint=True)
    with pytest.raises(smartinf.UsageError, match="induced"):
        NeighborSampler(data, [3], subgraph_type="induced")


def test_wrong_use_is_refused(tmp_path):
    folder = tmp_path / "device"
    with pytest.raises(smartinf.UsageError, match="has no features yet"):
        FeatureStore(folder)
    with pytest.raises(smartinf.UsageError, match="float64"):
        FeatureStore(folder, {"x": torch.zeros(3, 2, dtype=torch.float64)})
    with pytest.raises(smartinf.UsageError, match=r"shape \(3, 0\)"):
        FeatureStore(folder, {"x": torch.zeros(3, 0)})
    store = FeatureStore(folder, {"x": torch.zeros(3, 2)}, memory="32MiB")
    with pytest.raises(smartinf.Error, match="row 3 in place 1"):
        store.get_tensor(TensorAttr(None, "x", torch.tensor([0, 3])))
    with pytest.raises(KeyError, match="no tensor"):
        store.get_tensor(TensorAttr(None, "y", None))
    with pytest.raises(smartinf.UsageError, match="read only"):
        store.put_tensor(torch.zeros(3, 2), TensorAttr(None, "x", None))
    store.close()
    with pytest.raises(smartinf.UsageError, match="already"):
        FeatureStore(folder, {"x": torch.zeros(3, 2)})
    model = torch.nn.Linear(3, 3)
    smartinf.AdamW(model.parameters(), devices=[str(tmp_path / "other")]).close()
    with pytest.raises(smartinf.UsageError, match="not features"):
        FeatureStore(tmp_path / "other")
