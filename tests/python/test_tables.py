"""Tables of rows on devices: smartinf.move_tables() and the modules it makes, beside the same in memory."""

import copy
import json
import pathlib

import pytest
import torch
from nightly import nightly
from torch import nn

import smartinf
from smartinf.storage_optimizer import session_of

ROWS, DIM = 2003, 20
PADDING = 3

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch):
    """torch.optim.SparseAdam with roots as IEEE 754 says; MKL's are off by an ulp at times (docs/numerics.md)."""
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda values: values.copy_(values.double().sqrt()))


class Model(nn.Module):
    """width: of the dense part, which has a block of 65536 for each of `width` / 65536 / DIM devices."""

    def __init__(self, width=8, dtype=torch.float32, rows=ROWS, device=None):
        super().__init__()
        self.table = nn.Embedding(rows, DIM, padding_idx=PADDING, dtype=dtype, sparse=True, device=device)
        self.body = nn.Linear(DIM, width, dtype=dtype)

    def forward(self, ids):
        out = self.body(self.table(ids))  # gradients of a row differ from place to place, so that their order counts
        return (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).square().mean()


def made(width=8, **options):
    torch.manual_seed(5)
    return Model(width, **options)


def batch(step, rows=ROWS):
    """Few rows make most of it, and many come again; the padding is among them."""
    generator = torch.Generator().manual_seed(step)
    near = torch.rand(24, 3, generator=generator).pow(6) * rows
    return near.long().clamp(max=rows - 1)


def in_batch_order(*grads):
    """coalesce(), but with duplicates added in their order however many there are (docs/numerics.md); of
    several passes, in theirs."""
    rows, place = torch.cat([grad._indices()[0] for grad in grads]).unique(return_inverse=True)
    values = torch.cat([grad._values() for grad in grads])
    sums = torch.full((len(rows), values.shape[1]), -0.0).index_add_(0, place, values)
    return torch.sparse_coo_tensor(rows[None], sums, grads[0].shape, is_coalesced=True, check_invariants=True)


def optimizers(model, device, **options):
    """The same in memory: torch's SparseAdam for the table, ours for the rest."""
    rest = [named for named in model.named_parameters() if named[0] != "table.weight"]
    return torch.optim.SparseAdam([model.table.weight], lr=1e-2), smartinf.AdamW(rest, lr=1e-2, devices=[device], **options)


def train_in_memory(model, sparse, dense, steps, passes=1):
    losses, weight = [], model.table.weight
    for step in steps:
        grads = []  # torch merges sparse gradients of several passes in an order of its own
        for i in range(passes):
            loss = model(batch(100 * step + i)) / passes
            losses.append(loss.item())
            loss.backward()
            grads.append(weight.grad)
            weight.grad = None
        weight.grad = in_batch_order(*grads)
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return losses


def train(model, optimizer, steps, passes=1, rows=ROWS):
    losses = []
    for step in steps:
        for i in range(passes):
            loss = model(batch(100 * step + i, rows)) / passes
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_devices(devices, width=8, model=None, tables=None, **options):
    """The model with its table on devices, and its optimizer."""
    model = made(width) if model is None else model
    smartinf.move_tables(model, ["table"], **(tables or {}))
    return model, smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=devices, **options)


def planes(optimizer, table=0, rows=ROWS):
    """[rows, numbers of a record], the last one the step as an integer's bits."""
    pieces = []

    def visit(first, view):
        assert first == sum(map(len, pieces))
        flat = torch.frombuffer(bytearray(view), dtype=torch.float32)
        pieces.append(flat.view(-1, 3 * DIM + 1))

    session_of(optimizer).core.read_records(table, 0, rows, visit)
    return torch.cat(pieces)


def test_rows_have_torchs_bits(tmp_path):
    steps = range(500)
    reference = made()
    sparse, dense = optimizers(reference, tmp_path / "memory")
    expected = train_in_memory(reference, sparse, dense, steps)
    model, optimizer = on_devices([tmp_path / "device"])
    assert [name for name, _ in model.named_parameters()] == ["body.weight", "body.bias"]
    assert train(model, optimizer, steps) == expected
    weight = reference.table.weight
    state = sparse.state[weight]
    found = planes(optimizer)
    for i, plane in enumerate([weight.detach(), state["exp_avg"], state["exp_avg_sq"]]):
        assert torch.equal(found[:, i * DIM : (i + 1) * DIM], plane)
    assert torch.equal(model.table.rows(), weight.detach())
    assert torch.equal(model.table.rows(7, 2), weight.detach()[7:9])
    for mine, theirs in zip(model.body.parameters(), reference.body.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert set(found[:, -1].view(torch.int32).tolist()) > {0, 499, 500}


@pytest.mark.parametrize("options", [{}, {"overlap": "late"}, {"release_gradients": True, "max_grad_norm": 0}])
def test_accumulated_gradients_have_the_same_bits(tmp_path, options):
    reference = made()
    sparse, dense = optimizers(reference, tmp_path / "memory")
    expected = train_in_memory(reference, sparse, dense, range(20), passes=3)
    model = made()
    if options.get("overlap") == "late":
        options = {"overlap": model}
    if "release_gradients" in options:
        options = options | {"accumulation_steps": 3}
    model, optimizer = on_devices([tmp_path / "device"], model=model, **options)
    assert train(model, optimizer, range(20), passes=3) == expected
    assert torch.equal(model.table.rows(), reference.table.weight.detach())


WIDE = 4 * 65536 // DIM + 1


@pytest.mark.parametrize("rule", ["sparse_adam", "row_adagrad", "row_adam", "sgd", "adamw"])
def test_devices_and_caches_change_no_bit(tmp_path, rule):
    found = []
    for i, (devices, memory) in enumerate([(1, "64MiB"), (2, "64MiB"), (4, "80MiB"), (2, "34.8MiB")]):
        folders = [tmp_path / f"{i}-{d}" for d in range(devices)]
        tables = {"rule": rule, "memory": memory, "log": "2MiB"}
        model, optimizer = on_devices(folders, WIDE, tables=tables)
        losses = train(model, optimizer, range(30))
        found.append((losses, model.table.rows()))
        optimizer.close()
    for losses, rows in found[1:]:
        assert losses == found[0][0]
        assert torch.equal(rows, found[0][1])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("rows", "steps"), [(ROWS, 60), nightly(100_000, 300)])
def test_adamw_is_the_dense_one(tmp_path, rows, steps):
    """Rows that a step leaves out move as in dense AdamW, whenever they are looked at."""
    reference, by_torch = (made(rows=rows) for _ in range(2))
    reference.table.sparse = by_torch.table.sparse = False
    dense = smartinf.AdamW(reference.named_parameters(), lr=1e-2, weight_decay=0, devices=[tmp_path / "dense"])
    model, optimizer = on_devices([tmp_path / "rows"], model=made(rows=rows), tables={"rule": "adamw"}, weight_decay=0)
    in_memory = torch.optim.AdamW(by_torch.parameters(), lr=1e-2, weight_decay=0)
    for half in (range(steps // 2), range(steps // 2, steps)):
        found = train(model, optimizer, half, rows=rows)
        assert found == train(reference, dense, half, rows=rows)
        if half[0] == 0:
            assert found == pytest.approx(train(by_torch, in_memory, half, rows=rows), rel=1e-4)
            assert (model.table.rows() - by_torch.table.weight.detach()).abs().max() < 1e-3  # a tenth of one step
        for each in (model, reference):  # a step of the devices that is none of the optimizer
            with torch.no_grad():
                each.body.bias.add_(0.1)
    assert torch.equal(model.table.rows(), reference.table.weight.detach())


def test_a_run_goes_on(tmp_path):
    model, optimizer = on_devices([tmp_path / "whole"])
    expected = train(model, optimizer, range(40))
    folders = [tmp_path / "device"]
    found = []
    for steps in (range(15), range(15, 28), range(28, 40)):
        torch.manual_seed(len(found))  # values are those of the devices
        model, optimizer = on_devices(folders, model=made() if not found else Model(), resume=True)
        found += train(model, optimizer, steps)
        optimizer.close()
        with pytest.raises(smartinf.UsageError, match="closed"):
            model.table(torch.tensor([1]))
    assert found == expected


TRAIN = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import test_tables
    from smartinf.storage_optimizer import session_of

    model, optimizer = test_tables.on_devices(sys.argv[2:], test_tables.WIDE, resume=True,
        tables=dict(memory="34.8MiB", log="2MiB"))
    for step in range(optimizer.updates, {steps}):
        loss, = test_tables.train(model, optimizer, [step])
        print(step, loss, flush=True)
    optimizer.close()
"""


@pytest.mark.parametrize("kills", [8, nightly(100)])
def test_kills_lose_nothing(tmp_path, processes, kills):
    steps = 15 * kills
    model, optimizer = on_devices([tmp_path / "a", tmp_path / "b"], WIDE, tables={"log": "2MiB"})
    expected = train(model, optimizer, range(steps))
    folders = [str(tmp_path / "c"), str(tmp_path / "d")]
    found = processes.train_and_kill(kills, TRAIN.format(steps=steps), str(pathlib.Path(__file__).parent), *folders)
    # A step whose loss was not printed any more may have been committed.
    assert len(found) > 0.8 * steps and all(losses == {expected[step]} for step, losses in found.items())
    again, _ = on_devices(folders, WIDE, tables={"log": "2MiB"}, resume=True)
    assert torch.equal(again.table.rows(), model.table.rows())
    assert torch.equal(again.body.weight, model.body.weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(tmp_path, mode, weighted):
    if weighted and mode != "sum":
        pytest.skip("torch weights sums only")

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=PADDING, sparse=mode != "max")
            self.body = nn.Linear(DIM, 8)

        def forward(self, ids):
            weights = torch.linspace(0.5, 2, ids.numel()) if weighted else None
            if ids.shape[0] % 2:
                return self.body(self.table(ids, None, weights if weights is None else weights.view(ids.shape))).sum()
            offsets = torch.tensor([0, 5, 5, 11])
            return self.body(self.table(ids.reshape(-1), offsets, weights)).sum()

    torch.manual_seed(1)
    reference = Bags()
    model = copy.deepcopy(reference)
    smartinf.move_tables(model, "table")
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[tmp_path / "device"])
    rest = smartinf.AdamW(reference.body.parameters(), lr=1e-2, devices=[tmp_path / "memory"])
    sparse = torch.optim.SparseAdam([reference.table.weight], lr=1e-2)
    for step in range(12):
        ids = batch(step)[: 24 - step]
        expected, found = reference(ids), model(ids)
        assert found.item() == expected.item()
        for loss in (expected, found):
            loss.backward()
        weight = reference.table.weight
        if mode == "max":  # torch has no sparse gradient of it
            touched = ids[ids != PADDING].unique()
            weight.grad = torch.sparse_coo_tensor(touched[None], weight.grad[touched], weight.shape, is_coalesced=True, check_invariants=True)
        weight.grad = in_batch_order(weight.grad)
        for each in (sparse, rest, optimizer):
            each.step()
            each.zero_grad()
    assert torch.equal(model.table.rows(), reference.table.weight.detach())


def test_norm_and_bad_gradients(tmp_path):
    reference, model = made(), made()
    smartinf.move_tables(model, "table")
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[tmp_path / "device"], max_grad_norm=0.05)
    for step in range(3):
        reference.load_state_dict({"table.weight": model.table.rows(), **model.state_dict()})
        reference.zero_grad()
        reference(batch(step)).backward()
        grads = [in_batch_order(reference.table.weight.grad)._values(), *(p.grad for p in reference.body.parameters())]
        expected = torch.stack([grad.norm() for grad in grads]).norm().item()
        model(batch(step)).backward()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(expected, rel=1e-6)
        optimizer.zero_grad()
        before = model.table.rows()
        model(batch(step)).backward()
        session_of(optimizer).tables.pending[0][2][1, 2] = torch.inf
        with pytest.raises(smartinf.NonFiniteGradientError, match="table, row"):
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.table.rows(), before)


def test_forgotten_gradients(tmp_path):
    model, optimizer = on_devices([tmp_path / "device"])
    other, reference = on_devices([tmp_path / "reference"])
    model(batch(77)).backward()
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch(78))
    assert train(model, optimizer, range(5)) == train(other, reference, range(5))


def test_bfloat16(tmp_path):
    model, optimizer = on_devices([tmp_path / "device"], model=made(dtype=torch.bfloat16))
    assert model.table(torch.tensor([[1, 2]])).dtype == torch.bfloat16
    losses = train(model, optimizer, range(40))
    assert sum(losses[-5:]) < sum(losses[:5])
    assert model.float().table(torch.tensor([1])).dtype == torch.float32


def test_rows_without_values_are_random(tmp_path):
    def start(device, rows=ROWS, **options):
        torch.manual_seed(5)
        model = Model(rows=10)
        model.table = nn.Embedding(rows, DIM, device="meta")
        smartinf.move_tables(model, "table", std=0.5)
        return model, smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device], **options)

    model, optimizer = start(tmp_path / "device")
    rows = model.table.rows()
    assert rows.std().item() == pytest.approx(0.5, rel=0.02)
    assert rows.mean().item() == pytest.approx(0, abs=0.01)
    train(model, optimizer, range(3))
    touched = torch.cat([batch(100 * step).view(-1) for step in range(3)]).unique()
    changed = (model.table.rows() != rows).any(dim=1).nonzero()[:, 0]
    assert changed.tolist() == touched.tolist()
    optimizer.close()
    again, optimizer = start(tmp_path / "device", resume=True)
    assert torch.equal(again.table.rows(), model_rows := again.table.rows(0, ROWS))
    assert (model_rows != rows).any(dim=1).nonzero()[:, 0].tolist() == touched.tolist()


def test_frozen_tables_are_read_only(tmp_path):
    model = made()
    model.table.weight.requires_grad_(False)
    expected = model.table.weight.clone()
    model, optimizer = on_devices([tmp_path / "device"], model=model)
    train(model, optimizer, range(5))
    assert torch.equal(model.table.rows(), expected)
    optimizer.close()
    model = made()
    model.table.weight.requires_grad_(False).zero_()
    model, optimizer = on_devices([tmp_path / "device"], model=model, resume=True)
    assert torch.equal(model.table.rows(), expected)


def test_prefetch_changes_nothing(tmp_path):
    model, optimizer = on_devices([tmp_path / "device"])
    other, reference = on_devices([tmp_path / "reference"])
    for step in range(8):
        model.table.prefetch(batch(100 * (step + 1)))
        assert train(model, optimizer, [step]) == train(other, reference, [step])


def test_what_goes_wrong_is_said(tmp_path):
    device = tmp_path / "device"
    model = made()
    with pytest.raises(smartinf.UsageError, match="tabel is the name of no embedding of the model; there are table"):
        smartinf.move_tables(model, ["tabel"])
    with pytest.raises(smartinf.UsageError, match="rule='adam': known are"):
        smartinf.move_tables(model, ["table"], rule="adam")
    with pytest.raises(smartinf.UsageError, match="eps=0"):
        smartinf.move_tables(model, ["table"], eps=0)
    model.table.max_norm = 1.0
    with pytest.raises(smartinf.UsageError, match="max_norm=1.0"):
        smartinf.move_tables(model, ["table"])
    model.table.max_norm = None
    model.head = nn.Linear(DIM, ROWS)
    model.head.weight = model.table.weight
    with pytest.raises(smartinf.UsageError, match="shares its weight with head.weight"):
        smartinf.move_tables(model, ["table"])
    del model.head
    assert smartinf.move_tables(model, "tab*") == ["table"]
    with pytest.raises(smartinf.UsageError, match="a table already"):
        smartinf.move_tables(model, ["table"])
    with pytest.raises(smartinf.UsageError, match="make the optimizer first"):
        model(batch(0))
    with torch.no_grad():
        model(batch(0))  # as it is in memory
    for use in (lambda: model.table.weight + 1, lambda: copy.deepcopy(model), lambda: model.table.weight.data):
        with pytest.raises(smartinf.UsageError, match="on devices"):
            use()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    for bad in (ROWS, -1):
        with pytest.raises(smartinf.UsageError, match=f"row {bad} in place 1 of a batch"):
            model(torch.tensor([5, bad]))
    train(model, optimizer, range(2))
    with pytest.raises(smartinf.UsageError, match="have an optimizer already"):
        smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[tmp_path / "other"])
    with pytest.raises(smartinf.UsageError, match="has no rows of tables"):
        optimizer.full_state_dict()
    rows = model.table.rows()
    del optimizer  # the model still needs its rows
    assert torch.equal(model.table.rows(), rows)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device], resume=True)
    assert torch.equal(model.table.rows(), rows)
    optimizer.close()
    for other in ({"rule": "row_adam"}, {"std": 1.0}):
        with pytest.raises(smartinf.MismatchError, match="table: 2003 rows of 20"):
            on_devices([device], tables=other, resume=True)
    plain = made()
    smartinf.AdamW(plain.body.named_parameters(), lr=1e-2, devices=[tmp_path / "plain"])
    made_late = smartinf.AdamW(plain.table.parameters(), lr=1e-2, devices=[tmp_path / "late"])
    with pytest.raises(smartinf.UsageError, match="after the optimizer was made"):
        smartinf.move_tables(plain, "table")
    made_late.close()
    no_values = Model(device="meta")
    with pytest.raises(smartinf.UsageError, match="has no values"):
        smartinf.move_tables(no_values, "table")


# ---- Copies.


@pytest.mark.parametrize("rule", ["sparse_adam", "adamw"])
def test_a_checkpoint_has_the_rows(tmp_path, rule):
    model, optimizer = on_devices([tmp_path / "a", tmp_path / "b"], WIDE, tables={"rule": rule, "log": "2MiB"})
    train(model, optimizer, range(6))
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    rows, records = model.table.rows(), planes(optimizer)
    expected = train(model, optimizer, range(6, 10))
    # Into the same run, that has gone on; into another on one device; into that when it is opened again.
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(planes(optimizer).view(torch.int32), records.view(torch.int32))
    assert train(model, optimizer, range(6, 10)) == expected
    optimizer.close()
    torch.manual_seed(1)
    model, optimizer = on_devices([tmp_path / "c"], model=Model(WIDE), tables={"rule": rule})
    train(model, optimizer, range(20, 22))
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(model.table.rows(), rows)
    optimizer.close()
    model, optimizer = on_devices([tmp_path / "c"], model=Model(WIDE), tables={"rule": rule}, resume=True)
    # A group more: the devices are laid out anew.
    model.more = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [("more", model.more)]})
    assert torch.equal(model.table.rows(), rows)
    assert train(model, optimizer, range(6, 10)) == expected
    optimizer.close()
    plain = Model(WIDE)
    without = smartinf.AdamW(plain.body.named_parameters(prefix="body"), lr=1e-2, devices=[tmp_path / "d"])
    other = on_devices([tmp_path / "e"], model=Model(WIDE), tables={"rule": "row_adam"})[1]
    for optimizer, message in ((without, "has tables .table: 2003 rows of 20"), (other, rule + ".*row_adam")):
        with pytest.raises(smartinf.MismatchError, match=message):
            optimizer.load_checkpoint(tmp_path / "checkpoint")
        optimizer.close()
    # A row that is not what was written leaves everything as it is.
    model, optimizer = on_devices([tmp_path / "f"], model=Model(WIDE), tables={"rule": rule})
    before, flipped = planes(optimizer), 0
    for file in (tmp_path / "checkpoint").glob("device-*/smartinf.rows"):
        content = bytearray(file.read_bytes())
        if (at := content.find(records[9, :DIM].numpy().tobytes())) >= 0:
            content[at] ^= 1
            flipped += 1
        file.write_bytes(content)
    assert flipped == 1
    with pytest.raises(smartinf.CorruptError, match="rows .* of table table"):
        optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(planes(optimizer), before)


def test_tables_in_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = on_devices([tmp_path / "a"], model=made(dtype=torch.bfloat16))
    train(model, optimizer, range(3))
    folder = tmp_path / "folder"
    folder.mkdir()
    safetensors.save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        assert smartinf.save_tables(model, folder) == ["table-table.safetensors"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        found = {key: safetensors.load_file(folder / file)[key] for key, file in index.items()}
        assert sorted(found) == ["body.bias", "body.weight", "table.weight"]
        assert torch.equal(found["body.weight"], model.body.weight)
        assert torch.equal(found["table.weight"].float(), model.table.rows().to(torch.bfloat16).float())
    again = Model(dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    again.table = nn.Embedding(ROWS, DIM, dtype=torch.bfloat16, device="meta")
    again.body.load_state_dict(model.body.state_dict())
    _, more = on_devices([tmp_path / "b"], model=again, tables={"weights": folder})
    assert torch.equal(again.table.rows(), found["table.weight"].float())
    more.close()
    with pytest.raises(smartinf.UsageError, match="has no other.weight"):
        smartinf.move_tables(nn.ModuleDict({"other": nn.Embedding(ROWS, DIM)}), ["other"], weights=folder)
    with pytest.raises(smartinf.UsageError, match=r"is \[2003, 20\] in .* and \[9, 20\]"):
        smartinf.move_tables(made(rows=9), ["table"], weights=folder)
    with pytest.raises(smartinf.UsageError, match="no tables"):
        smartinf.save_tables(made(), folder)


# ---- Models of transformers that have such tables.


def qwen4_exp():
    from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=16, hc_count=2,
        hc_lowrank=8, ple_layer_ids=[1], ple_embed_dim=32, heads_per_ngram=2, ngram_vocab_size_base=500, eos_token_id=0,
        layer_types=["linear_attention", "indexed_attention"], linear_num_value_heads=2, linear_num_key_heads=1,
        linear_key_head_dim=16, linear_value_head_dim=16, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
        indexer_budget=16, indexer_compress_ratio=4,
    )  # fmt: skip
    return Qwen4ExpForCausalLM(config), "*.ngram_embedding"


def _gemma(config, model, **more):
    config = config(
        vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_kv_shared_layers=0,
        sliding_window=8, layer_types=["sliding_attention"] * 3 + ["full_attention"], **more,
    )  # fmt: skip
    return model(config), "embed_tokens_per_layer"


def gemma3n():
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    return _gemma(
        Gemma3nTextConfig, Gemma3nForCausalLM, altup_num_inputs=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4
    )


def gemma4():
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return _gemma(Gemma4TextConfig, Gemma4ForCausalLM, global_head_dim=16)


@pytest.mark.parametrize("make", [qwen4_exp, gemma3n, gemma4])
def test_models_of_transformers(tmp_path, make):
    """Under Trainer, with one line: the losses of the same model with the table in memory."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    torch.manual_seed(3)
    reference, name = make()
    model = copy.deepcopy(reference)
    texts = torch.randint(1, 97, (24, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]

    (moved,) = smartinf.move_tables(model, [name])
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[tmp_path / "device"], max_grad_norm=0)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=12, logging_steps=1, max_grad_norm=0,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip

    class Recorded(transformers.Trainer):
        def training_step(self, *given, **more):
            loss = super().training_step(*given, **more)
            losses.append(loss.item())
            return loss

    losses = []
    Recorded(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    found, losses = losses, []

    table = reference.get_submodule(moved)
    table.sparse = True
    rest = [named for named in reference.named_parameters() if named[1] is not table.weight]
    dense = smartinf.AdamW(rest, lr=1e-3, devices=[tmp_path / "memory"], max_grad_norm=0)
    sparse = torch.optim.SparseAdam([table.weight], lr=1e-3)

    class Both(torch.optim.Optimizer):
        def __init__(self):
            super().__init__([torch.zeros(1, requires_grad=True)], {"lr": 1e-3})

        def step(self, closure=None):
            table.weight.grad = in_batch_order(table.weight.grad)
            for each in (sparse, dense):
                each.step()

        def zero_grad(self, set_to_none=True):
            for each in (sparse, dense):
                each.zero_grad()

    Recorded(model=reference, args=arguments, train_dataset=data, optimizers=(Both(), None)).train()
    assert len(found) == 12
    assert found == losses
    assert torch.equal(model.get_submodule(moved).rows(), table.weight.detach())


def test_trainer_resumes_from_its_checkpoint(tmp_path):
    """On other devices, with rows; and the best model's rows come back with it."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    pytest.importorskip("smartinf.hf")
    torch.manual_seed(3)
    start, name = gemma4()
    texts = torch.randint(1, 97, (24, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=6, max_grad_norm=0, save_steps=3,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=3,
    )  # fmt: skip

    def trained(device, **more):
        model = copy.deepcopy(start)
        (moved,) = smartinf.move_tables(model, [name])
        optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3, devices=[device], max_grad_norm=0)
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None)
        )
        trainer.train(**more)
        return trainer, model.get_submodule(moved)

    trainer, table = trained(tmp_path / "a")
    rows = table.rows()
    trainer.state.best_model_checkpoint = str(tmp_path / "out" / "checkpoint-3")
    trainer._load_best_model()
    at_three = table.rows()
    assert not torch.equal(at_three, rows)
    _, table = trained(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert torch.equal(table.rows(), rows)
