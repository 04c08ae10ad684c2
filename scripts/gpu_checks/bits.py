"""Bits: what is trained on the device beside the same on the CPU, or beside the same model resident on the device."""

import contextlib
import functools
import importlib.util
import os

from rows import check

STEPS = 5


def _state(optimizer):
    """Master weights and moments of each parameter, by name."""
    import torch

    found = {}

    def visit(name, param, planes):
        found[name] = [planes[key].clone() for key in sorted(planes) if isinstance(planes[key], torch.Tensor)]

    optimizer.visit_full_state(visit)
    return [plane for name in sorted(found) for plane in found[name]]


def _given(device, place, dtype, accumulate=1, scaler=False, **options):
    """Trains with gradients that are given, not computed: what is on the devices must have the same bits on any
    device. Returns parameters and state."""
    import torch

    import smartinf

    shapes = [(300, 65), (65,), (7,), (1000, 129), (129, 2, 3), (1 << 18,)]
    numbers = torch.Generator().manual_seed(1)

    def some(shape, scale):
        return (torch.randn(shape, generator=numbers) * scale).to(dtype)

    class Block(torch.nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.weight = torch.nn.Parameter(some(shape, 0.1))

        def forward(self, gradient):
            return (self.weight * gradient).sum()  # whose gradient is `gradient`, exactly

    model = torch.nn.Sequential(*map(Block, shapes)).to(device)
    if "overlap" in options:
        options["model"] = model
    optimizer = smartinf.AdamW(
        model.named_parameters(), lr=1e-2, devices=[place], memory_budget="64MiB",
        accumulation_steps=accumulate if options.get("release_gradients") else 1, **options,
    )  # fmt: skip
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0) if scaler else None
    for step in range(STEPS):
        for _ in range(accumulate):
            given = [some(shape, 0.1) for shape in shapes]
            if scaler is not None and step == 2:
                given[3].view(-1)[5] = float("inf")  # this step is skipped
            loss = sum(block(g.to(device)) for block, g in zip(model, given, strict=True))
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    found = []
    found += _state(optimizer)
    found += [param.detach().cpu().clone() for param in model.parameters()]
    optimizer.close()
    return found


@check(seconds=90)
def optimizer(here):
    import torch

    released = {"release_gradients": True, "max_grad_norm": 1.0}
    variants = {
        "held": {},
        "clipped": {"max_grad_norm": 0.5},
        "bf16": {"dtype": torch.bfloat16, **released},
        "released": {"release_gradients": True, "max_grad_norm": 0},
        "accumulated": {"accumulate": 3, **released},
        "accumulated-held": {"accumulate": 3},
        "late": {"overlap": "late"},
        "late-released": {"overlap": "late", **released},
        "early": {"overlap": "early", "release_gradients": True, "max_grad_norm": 0},
        "early-clipped": {"overlap": "early", **released},
        "scaler": {"scaler": True},
        "scaler-released": {"scaler": True, "release_gradients": True, "max_grad_norm": 0},
        "f16": {"dtype": torch.float16, **released},
        "m24-q4": {"state_format": "q4", "master": "m24", **released},
        "compressed": {"compress": 0.08},
    }
    for name, variant in variants.items():
        variant = {"dtype": torch.float32, **variant}
        if name == "scaler-released" and here.test_accelerator is not None:
            here.row(name, None, why="the test accelerator has no sparse tensors, which GradScaler makes")
            continue
        here.compare(
            name,
            functools.partial(_given, here.device, here.place(f"device-{name}"), **variant),
            functools.partial(_given, "cpu", here.place(f"cpu-{name}"), **variant),
        )


@check(seconds=60, cuda=True)
def nccl(here):
    """One rank, which makes the calls of several."""
    import torch

    variants = {
        "released": {"release_gradients": True, "max_grad_norm": 1.0},
        "accumulated": {"accumulate": 2, "release_gradients": True, "max_grad_norm": 1.0},
        "held": {"max_grad_norm": 1.0},
    }
    alone = {n: _given("cpu", here.place(f"cpu-{n}"), torch.float32, **v) for n, v in variants.items()}
    os.environ |= {"SMARTINF_RANKS": "nccl", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    for name, variant in variants.items():
        found = functools.partial(_given, here.device, here.place(f"device-{name}"), torch.float32, **variant)
        here.compare(name, found, functools.partial(alone.get, name))
    torch.distributed.destroy_process_group()


def _folder(here, dtype):
    """A small Llama with random weights, as transformers saves it."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=320, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    folder = here.place("model")
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def _made(here, folder, dtype, name, streamed):
    import torch
    import transformers

    import smartinf

    where = here.place(name)
    if streamed and here.test_accelerator is not None and (2, 15) > tuple(map(int, torch.__version__.split(".")[:2])):
        # Parameters of a device of PrivateUse1 could not come from the CPU yet: the model is there before it is streamed.
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(here.device)
        return smartinf.stream(model, [where], memory_budget="256MiB", keep=0), {}
    if streamed:
        model = smartinf.from_pretrained(folder, devices=[where], memory_budget="256MiB", keep=0, dtype=dtype)
        return model.to(here.device), {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(here.device), {"devices": [where]}


def _trained(here, folder, dtype, name, streamed, prepare=None, together=1, offload=False, **options):
    """Losses, parameters and state after some steps."""
    import torch

    import smartinf

    torch.manual_seed(5)
    model, where = _made(here, folder, dtype, name, streamed)
    if prepare is not None:
        model = prepare(model)
    if "overlap" in options:
        options["model"] = model
    optimizer = smartinf.AdamW(
        [(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=1e-3, **where, **options
    )
    offloaded = contextlib.nullcontext()
    if offload:
        offloaded = smartinf.offload_activations(
            model, devices=[here.place(f"{name}-activations")], memory_budget="8MiB", keep=0
        )
    ids = torch.randint(1000, (STEPS, together, 4, 96), generator=torch.Generator().manual_seed(7))
    found = []
    model.train()
    with offloaded:
        for step in range(STEPS):
            batches = [{"input_ids": x.to(here.device), "labels": x.to(here.device)} for x in ids[step]]
            if together > 1:
                found += [loss.cpu() for loss in smartinf.forward_backward(model, batches)]
            else:
                loss = model(**batches[0]).loss
                loss.backward()
                found.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found.append(model(input_ids=ids[0, 0].to(here.device)).logits.cpu())
    found += _state(optimizer)
    optimizer.close()
    return found


def _checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _compiled(model):
    for block in model.model.layers:
        block.compile()
    return model


def _with_adapters(model):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def streamed_variants(here, variants):
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    if importlib.util.find_spec("transformers") is None:
        return here.row("", None, why="transformers is not installed")
    dtype = torch.bfloat16
    folder = _folder(here, dtype)
    for name, variant in variants.items():
        alone = {key: value for key, value in variant.items() if key != "offload"}
        here.compare(
            name,
            functools.partial(_trained, here, folder, dtype, f"streamed-{name}", True, **variant),
            functools.partial(_trained, here, folder, dtype, f"resident-{name}", False, **alone),
        )
    return None


@check(seconds=120)
def streamed(here):
    streamed_variants(here, {
        "plain": {"max_grad_norm": 0},
        "overlapped": {"overlap": "late", "release_gradients": True, "max_grad_norm": 1.0},
        "together": {"together": 3, "release_gradients": True, "accumulation_steps": 3, "max_grad_norm": 1.0},
        "checkpointed": {"prepare": _checkpointed, "max_grad_norm": 1.0},
        "activations": {"offload": True, "max_grad_norm": 0},
    })  # fmt: skip


@check(seconds=90)
def adapters(here):
    if importlib.util.find_spec("peft") is None:
        return here.row("", None, why="peft is not installed")
    return streamed_variants(here, {"streamed": {"prepare": _with_adapters, "max_grad_norm": 0}})


@check(seconds=150, cuda=True)
def compiled(here):
    streamed_variants(here, {"blocks": {"prepare": _compiled, "max_grad_norm": 0}})
