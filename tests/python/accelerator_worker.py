"""On the test accelerator: accelerator_worker.py LIBRARY DEVICE offload|stream|overlap. Fails where bits differ."""

import contextlib
import ctypes
import sys
import types

import torch

NAME = "test_accelerator"


class Memory(ctypes.Structure):
    """Of accelerator.h: bytes in use, and the most that were."""

    _fields_ = [("current", ctypes.c_uint64), ("peak", ctypes.c_uint64)]  # noqa: RUF012


def load(library):
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(NAME)
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(NAME, module)


def train(model, x, context):
    found = []
    with context:
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
            model.zero_grad()
    return found


def offload():
    """offload_activations."""
    import smartinf

    torch.manual_seed(0)
    layers = [(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256)) for _ in range(6)]
    model = torch.nn.Sequential(*(module for layer in layers for module in layer)).to(NAME)
    x = torch.randn(256, 256).to(NAME)
    wanted = train(model, x, contextlib.nullcontext())
    for keep in (0, "auto", 0.5):
        context = smartinf.offload_activations(
            model, sys.argv[2], keep=keep, memory_budget="1MiB", storage="64MiB"
        )
        found = train(model, x, context)
        counts = context.counts
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), keep
        assert counts.written_bytes > 0, counts
        assert keep != 0 or (counts.kept_bytes == 0 and counts.read_bytes > 0), counts


def stream():
    """A streamed model of more bytes than the accelerator has, with the bits of the CPU's."""
    import smartinf
    from smartinf import device_copies

    device_copies._PIECE_ELEMENTS, device_copies._RING_BYTES = 1 << 18, 0  # one layer's gradient on its way

    def trained(model, optimizer, device):
        found = []
        for step in range(3):
            x = torch.randn(16, 512, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().mean().backward()
            optimizer.step()
            found.append(optimizer.grad_norm)
        return found

    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)))

    options = {"lr": 1e-2, "max_grad_norm": 1.0}
    plain = make()
    with smartinf.AdamW(plain.parameters(), devices=sys.argv[2] + "-plain", release_gradients=True, **options) as adamw:
        wanted = trained(plain, adamw, "cpu")
    # torch cannot move these parameters there once they are streamed, as it can to CUDA.
    model = smartinf.stream(make().to(NAME), sys.argv[2], layers=[""], memory_budget="128MiB", keep=0)
    lib = ctypes.CDLL(sys.argv[1])
    lib.smartinf_test_accelerator_reset_peak()
    with smartinf.AdamW(model.parameters(), **options) as adamw:
        assert trained(model, adamw, NAME) == wanted
        lib.smartinf_test_accelerator_memory.restype = Memory
        peak = lib.smartinf_test_accelerator_memory().peak
        weights = sum(p.nbytes for p in model.parameters())
        assert peak < weights / 2, (peak, weights)


def overlap():
    """Weights that are copied to the accelerator, used by themselves, and written in the middle."""
    import smartinf

    def trained(overlap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))).to(NAME)
        options = {"overlap": overlap, "model": model} if overlap else {}
        device, found = {"path": f"{sys.argv[2]}-{overlap}", "bandwidth": 3e7}, []
        with smartinf.AdamW(
            model.named_parameters(), lr=1e-2, devices=[device], release_gradients=True, max_grad_norm=0, **options
        ) as adamw:
            for step in range(4):
                x = torch.randn(16, 300, generator=torch.Generator().manual_seed(step)).to(NAME)
                loss = (model(x @ model[3].weight.t()) + x @ model[2].weight.detach()).square().mean()
                loss.backward()
                adamw.step()
                adamw.zero_grad()
                model[1].weight.data[100:200] = 0.01 * step
                found.append(loss.detach().cpu())
        return found, [param.detach().cpu() for param in model.parameters()]

    losses, weights = trained(None)
    assert (weights[2][100:200] - 0.03).abs().max() == 0
    for how in ("late", "early"):
        made, there = trained(how)
        assert made == losses, how
        assert all(torch.equal(a, b) for a, b in zip(there, weights, strict=True)), how


load(sys.argv[1])
{"offload": offload, "stream": stream, "overlap": overlap}[sys.argv[3]]()
