"""Models on a device of their own, the pretend accelerator of tests/accelerator, whose copies come late and whose check
finds an event that is missing: the same bits as on the CPU. A process has one such device, so that this file runs alone
and only with SMARTINF_TEST_ACCELERATOR, the path of its library."""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import smartinf
from smartinf import device_copies, device_slots, streamed_model, streaming, units

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerator"))
import test_accelerator  # noqa: E402

LIBRARY = os.environ.get("SMARTINF_TEST_ACCELERATOR")
if not LIBRARY:
    pytest.skip("SMARTINF_TEST_ACCELERATOR does not name the library", allow_module_level=True)
os.environ.setdefault("SMARTINF_TEST_ACCELERATOR_DELAY_US", "2000")
ACCELERATOR = test_accelerator.register(LIBRARY)
CPU = torch.device("cpu")
STEPS = 3
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def ordered():
    """Nothing is out of order, also where nobody has heard of the error."""
    before = test_accelerator.order_errors()
    yield
    torch.accelerator.synchronize()
    assert test_accelerator.order_errors() == before


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """Gradients of several pieces, and a ring that is full all the time."""
    monkeypatch.setattr(device_copies, "_PIECE_ELEMENTS", 1 << 20)
    monkeypatch.setattr(device_copies, "_RING_BYTES", 0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1100, 1000)
        self.body = torch.nn.ModuleList(torch.nn.Linear(1000, 1000) for _ in range(3))
        self.norm = torch.nn.LayerNorm(1000)
        self.head = torch.nn.Linear(1000, 1100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        for layer in self.body:
            h = h + torch.nn.functional.gelu(layer(h))
        return self.head(self.norm(h))


def made(device, folder, dtype, overlap=None, **options):
    torch.manual_seed(5)
    model = Model().to(dtype).to(device)
    model.head.weight = model.embed.weight  # torch makes new parameters for a device of this kind
    if overlap is not None:
        options |= {"overlap": overlap, "model": model}
    return model, smartinf.AdamW(model.parameters(), **({"lr": 1e-3, "devices": [str(folder)]} | options))


def backward(model, device, number):
    x = torch.randint(0, 1100, (2, 6), generator=torch.Generator().manual_seed(number)).to(device)
    loss = torch.nn.functional.cross_entropy(model(x).view(-1, 1100).float(), x.roll(1, 1).view(-1))
    loss.backward()
    return loss.item()


def weights(model):
    return [param.detach().to("cpu", copy=True) for param in model.parameters()]


def run(device, folder, dtype=torch.float32, passes=1, **options):
    """Losses, norms and weights of some steps; between two of them the optimizer is made anew."""
    model, optimizer = made(device, folder, dtype, **options)
    seen = []
    for step in range(STEPS):
        if step == 2:
            optimizer.close()
            trained = dict(model.state_dict())
            model, optimizer = made(device, folder, dtype, resume=True, **options)
            assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
        seen += [backward(model, device, passes * step + k) for k in range(passes)]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(optimizer.grad_norm))
        if options.get("overlap") is None:
            seen += weights(model)
    optimizer.wait_weights()
    seen += weights(model)
    optimizer.close()
    return seen


def same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.5},
        {"release_gradients": True},
        {"release_gradients": True, "max_grad_norm": 0.5, "accumulation_steps": 2, "passes": 2},
        {"release_gradients": True, "overlap": "late"},
        {"release_gradients": True, "overlap": "early", "max_grad_norm": 0},
        {"release_gradients": True, "overlap": "early", "max_grad_norm": 0.5},
        {"overlap": "late"},
    ],
    ids=str,
)
def test_the_optimizer_of_a_device_has_the_bits_of_the_cpu(tmp_path, options, dtype):
    same(run(CPU, tmp_path / "cpu", dtype, **options), run(ACCELERATOR, tmp_path / "device", dtype, **options))


def test_memory_that_was_copied_from_may_be_written_behind_wait():
    host, there, uploads = torch.ones(1000).pin_memory(), torch.zeros(1000, device=ACCELERATOR), device_copies.Uploads()
    uploads.start(there, host)  # behind what has written the zeros
    uploads.wait()
    host.zero_()
    assert there.sum().item() == 1000


# ---- Streamed models.


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(units, "_KEPT_BYTES", 1 << 10)
    monkeypatch.setattr(streaming, "_ENGINE_BYTES_MIN", 24 << 20)
    monkeypatch.setattr(streaming, "_STRIPE_BYTES", (4 << 16,))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(160)
        self.up, self.down = torch.nn.Linear(160, width), torch.nn.Linear(width, 160)

    def forward(self, h):
        return h + self.down(torch.nn.functional.silu(self.up(self.norm(h))))


class Streamed(torch.nn.Module):
    """Blocks whose parameters begin anywhere; the embedding is the head, too, and larger than they are."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1100, 160)
        self.layers = torch.nn.ModuleList(Block(301 + 50 * (k % 2)) for k in range(6))
        self.head = torch.nn.Linear(160, 1100, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoint = False

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            if self.checkpoint and torch.is_grad_enabled():
                h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False)
            else:
                h = layer(h)
        return self.head(h)


def streamed(device, folder, dtype, **options):
    torch.manual_seed(5)
    model = Streamed().to(dtype).to(device)  # before it is streamed: torch has no other way for a device of this kind
    model.head.weight = model.embed.weight
    return smartinf.stream(model, [str(folder)], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [0, "250KB"])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("unified", ["no", "yes"])
def test_a_streamed_model_has_the_bits_of_the_cpu(
    tmp_path, small_units, monkeypatch, dtype, keep, checkpoint, unified
):
    monkeypatch.setenv("SMARTINF_UNIFIED_MEMORY", unified)

    def run(device):
        model = streamed(device, tmp_path / device.type, dtype, keep=keep)
        model.checkpoint = checkpoint
        with torch.no_grad():
            seen = [model(torch.arange(7, device=device).view(1, 7)).cpu()]
        optimizer = smartinf.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            seen.append(backward(model, device, step))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(torch.arange(7, device=device).view(1, 7)).cpu())
        seen += [value.to("cpu") for value in model.state_dict().values()]
        optimizer.close()
        return seen

    same(run(CPU), run(ACCELERATOR))


def test_two_units_are_copied_ahead_and_whoever_computes_waits_for_them(tmp_path, small_units):
    model = streamed(ACCELERATOR, tmp_path / "device", torch.float32, keep=0)
    stream = streamed_model.of(model.parameters()).stream
    [window] = stream._windows()
    window.start(range(len(stream.units)))
    while not all(window._window.has_come(number) for number in (1, 2)):
        time.sleep(0.001)
    stream.gather(0)
    assert {slot.span for slot in window._on_device._slots} == {0, 1, 2}
    saved = stream.saved_as(stream.params[0])
    stream._in_backward = frozenset([0])
    with torch.Stream(device=ACCELERATOR):  # for which nobody has waited yet
        stream.restore(saved).sum()
    with torch.Stream(device=ACCELERATOR):
        stream.gather(0)
        stream.params[0].detach().sum()
        torch.accelerator.synchronize()
    stream.release(0)
    stream.release(0)


def test_a_slot_that_an_error_has_left_held_is_used_again(tmp_path, small_units, monkeypatch):
    model = streamed(ACCELERATOR, tmp_path / "device", torch.float32, keep=0)
    stream = streamed_model.of(model.parameters()).stream
    [window] = stream._windows()

    def fails(self):
        raise smartinf.DeviceError("a read ahead")

    window.start(range(len(stream.units)))
    with monkeypatch.context() as patch:
        patch.setattr(device_slots.DeviceSlots, "_copy_ahead", fails)
        with pytest.raises(smartinf.DeviceError):
            stream.gather(1)
    assert not any(slot.held for slot in window._on_device._slots)


def test_a_slot_of_unified_memory_is_given_back_when_it_is_not_computed_with_any_more():
    class Window:
        released = []

        def has_come(self, number):
            return True

        def get(self, number):
            return 4096

        def release(self, number):
            self.released.append(number)

    slots = device_slots.SharedSlots(Window(), [[(0, 4)]], 3, ACCELERATOR)
    test_accelerator.hold_copies(True)
    try:
        torch.zeros(1000).pin_memory().to(ACCELERATOR, non_blocking=True)  # what is computed
        slots.get(0)
        slots.release(0)
        slots.get(0)
        assert Window.released == []
    finally:
        test_accelerator.hold_copies(False)
    slots.free_window()
    assert Window.released == [0]


# ---- Activations.


@pytest.mark.parametrize("budget", ["1MiB", "16MiB"])  # most of it comes from the devices again; nothing of it
def test_offloaded_activations_have_the_bits_of_the_cpu(tmp_path, budget):
    def run(device):
        torch.manual_seed(5)
        model = Streamed().to(device)
        model.head.weight = model.embed.weight
        counts = []
        for step in range(2):
            x = torch.randint(0, 1100, (4, 64), generator=torch.Generator().manual_seed(step)).to(device)
            folder = tmp_path / f"{device.type}{step}"
            with smartinf.offload_activations(
                model, [str(folder)], keep=0, memory_budget=budget, storage="32MiB"
            ) as offloaded:
                torch.nn.functional.cross_entropy(model(x).view(-1, 1100), x.roll(1, 1).view(-1)).backward()
            counts.append(offloaded.counts)
        return [param.grad.to("cpu") for param in model.parameters()], counts[-1]

    (expected, _), (found, counts) = run(CPU), run(ACCELERATOR)
    same(expected, found)
    assert counts.kept_bytes == 0 and counts.written_bytes > counts.saved_bytes / 2 > 2 << 20
    assert (counts.read_bytes > counts.written_bytes / 2) == (budget == "1MiB")


# ---- The thread that hands over gradients.


def _downloads():
    lock = threading.RLock()
    return lock, device_copies.Downloads(1 << 20, lock)


def test_gradients_are_handed_over_while_nobody_calls():
    lock, downloads = _downloads()
    values, came = torch.arange(5000.0, device=ACCELERATOR), []
    with lock:
        downloads.start(values, lambda first, piece: came.append((first, piece.clone())))
        time.sleep(0.05)
        assert not came, "the lock is held"
    deadline = time.monotonic() + 60
    while sum(len(piece) for _, piece in came) < 5000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [first for first, _ in came] == sorted(first for first, _ in came)
    assert torch.equal(torch.cat([piece for _, piece in came]), values.cpu())


def test_what_fails_on_the_way_is_raised_by_the_next_call():
    lock, downloads = _downloads()
    values = torch.ones(5000, device=ACCELERATOR)

    def fails(first, piece):
        raise ValueError("the device is gone")

    def failed():
        with lock:
            downloads.start(values, fails)
        deadline = time.monotonic() + 60
        while downloads._failure is None and time.monotonic() < deadline:
            time.sleep(0.01)

    failed()
    with lock, pytest.raises(ValueError, match="is gone"):
        downloads.start(values, lambda *_: None)
    failed()
    downloads.drop()
    with lock:
        downloads.finish()


# ---- All of it together.


@pytest.mark.parametrize("keep", [0, "auto", 0.5])
def test_a_graph_that_is_used_twice(tmp_path, keep):
    torch.manual_seed(0)
    layers = [(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)) for _ in range(6)]
    model = torch.nn.Sequential(*(module for layer in layers for module in layer)).to(ACCELERATOR)
    x = torch.randn(256, 256).to(ACCELERATOR)

    def trained(context):
        found = []
        with context:
            for _ in range(3):
                loss = model(x).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
                model.zero_grad()
        return found

    offloaded = smartinf.offload_activations(
        model, [str(tmp_path)], keep=keep, memory_budget="1MiB", storage="64MiB"
    )
    same(trained(contextlib.nullcontext()), trained(offloaded))
    counts = offloaded.counts
    assert counts.written_bytes > 0
    assert keep != 0 or (counts.kept_bytes == 0 and counts.read_bytes > 0)


def test_a_streamed_model_of_more_bytes_than_it_takes_there(tmp_path, monkeypatch):
    monkeypatch.setattr(device_copies, "_PIECE_ELEMENTS", 1 << 18)  # one layer's gradient on its way

    def make(device):
        torch.manual_seed(0)
        blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)]
        return torch.nn.Sequential(*blocks).to(device)

    def trained(model, device, **where):
        norms = []
        options = {"lr": 1e-2, "max_grad_norm": 1.0, "release_gradients": True}
        with smartinf.AdamW(model.parameters(), **options, **where) as optimizer:
            for step in range(STEPS):
                x = torch.randn(16, 512, generator=torch.Generator().manual_seed(step)).to(device)
                model(x).square().mean().backward()
                optimizer.step()
                norms.append(optimizer.grad_norm)
        return norms

    expected = trained(make(CPU), CPU, devices=[str(tmp_path / "cpu")])
    # torch cannot move these parameters there once they are streamed, as it can to CUDA.
    folder = [str(tmp_path / "there")]
    model = smartinf.stream(make(ACCELERATOR), folder, layers=[""], memory_budget="128MiB", keep=0)
    before = test_accelerator.reset_peak()
    assert trained(model, ACCELERATOR) == expected
    assert test_accelerator.peak() - before < sum(p.nbytes for p in model.parameters()) / 2


def test_weights_that_are_used_by_themselves_and_written_in_the_middle(tmp_path):
    def trained(overlap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))).to(ACCELERATOR)
        options = {"overlap": overlap, "model": model} if overlap else {}
        device, losses = {"path": str(tmp_path / str(overlap)), "bandwidth": 3e7}, []
        with smartinf.AdamW(
            model.named_parameters(), lr=1e-2, devices=[device], release_gradients=True, max_grad_norm=0, **options
        ) as optimizer:
            for step in range(4):
                x = torch.randn(16, 300, generator=torch.Generator().manual_seed(step)).to(ACCELERATOR)
                loss = (model(x @ model[3].weight.t()) + x @ model[2].weight.detach()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                model[1].weight.data[100:200] = 0.01 * step
                losses.append(loss.detach().cpu())
        return losses, [param.detach().cpu() for param in model.parameters()]

    losses, weights = trained(None)
    assert (weights[2][100:200] - 0.03).abs().max() == 0
    for how in ("late", "early"):
        found, there = trained(how)
        assert found == losses, how
        same(weights, there)


def test_a_device_cache_has_the_bits_of_the_cpu():
    """Without padding: attention of this device takes no mask."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip

    def run(device):
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config).to(device).eval()
        tokens = torch.randint(1, 96, (2, 45), generator=torch.Generator().manual_seed(1)).to(device)
        with smartinf.DeviceCache(model) as cache, torch.no_grad():
            model.set_attn_implementation("smartinf")
            return [
                model(tokens[:, first:end], past_key_values=cache).logits.cpu()
                for first, end in ((0, 40), (40, 41), (41, 45))
            ]

    same(run(ACCELERATOR), run(CPU))
