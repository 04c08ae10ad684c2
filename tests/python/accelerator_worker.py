"""offload_activations on the test accelerator: accelerator_worker.py LIBRARY DEVICE. Fails where bits differ."""

import contextlib
import sys
import types

import torch

NAME = "test_accelerator"


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


def main():
    load(sys.argv[1])
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


main()
