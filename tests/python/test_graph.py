"""Features on devices: smartinf.graph.FeatureStore, read as torch_geometric's loaders read it."""

import numpy
import pytest
import torch

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, TensorAttr
from torch_geometric.loader.utils import filter_custom_store
from torch_geometric.testing import MyGraphStore

import smartinf
from smartinf.graph import FeatureStore

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
