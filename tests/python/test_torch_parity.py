"""Our optimizers against torch.optim's on f32, fed the same gradients: every option we accept.

The two round differently (torch fuses some multiplications and additions, we never do), so equality
is asked for to a number of ulps: see close_ulps.
"""

import random

import pytest
import torch

import smartinf

STEPS = 12
ULPS_A_STEP = 3
EPS = 2.0**-23


def close_ulps(ours, theirs, largest, steps):
    """|ours - theirs| in ulps of the largest value that the element (or its update) has had."""
    error = (ours - theirs).abs() / (largest * EPS)
    assert float(error.max()) <= ULPS_A_STEP * steps, f"{float(error.max())} ulps after {steps} steps"


def make_params(seed, shapes=((17, 33), (257,), (), (3, 4, 5))):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def run(name, device, groups, **options):
    """STEPS steps of ours and torch's side by side over two sets of equal parameters."""
    ours, theirs = make_params(1), make_params(1)

    def grouped(params):
        if not groups:
            return params
        first, second = groups
        return [{"params": params[:2], **first}, {"params": params[2:], **second}]

    optimizer = getattr(smartinf, name)(grouped(ours), **options, devices=[device])
    reference = getattr(torch.optim, name)(grouped(theirs), **options)
    generator = torch.Generator().manual_seed(2)
    rng = random.Random(3)
    largest = [p.detach().abs().clone() for p in theirs]
    for step in range(1, STEPS + 1):
        for mine, other in zip(ours, theirs, strict=True):
            if rng.random() < 0.2:
                mine.grad = other.grad = None
                continue
            scale = 10.0 ** rng.uniform(-3, 1)
            other.grad = torch.randn(other.shape, generator=generator) * scale
            mine.grad = other.grad.clone()
        for group, torchs in zip(optimizer.param_groups, reference.param_groups, strict=True):
            group["lr"] = torchs["lr"] = torchs["lr"] * rng.uniform(0.5, 1.5)
        before = [p.detach().clone() for p in theirs]
        optimizer.step()
        reference.step()
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            moved = (other.detach() - before[i]).abs()
            largest[i] = torch.maximum(largest[i], torch.maximum(other.detach().abs(), moved))
            if other.grad is None:
                assert torch.equal(other, before[i])
            close_ulps(mine.detach(), other.detach(), largest[i], step)
    optimizer.close()


ADAM = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3},
    {"lr": 3e-2, "maximize": True},
    {"lr": 1e-2, "betas": (0.0, 0.99), "weight_decay": 0.0},
]


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("options", ADAM)
def test_adam(name, options, device):
    run(name, device, None, **options)


SGD = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"lr": 0.1, "momentum": 0.8, "dampening": 0.5, "maximize": True},
    {"lr": 0.1, "momentum": 0.0, "dampening": 0.5},
]


@pytest.mark.parametrize("options", SGD)
def test_sgd(options, device):
    run("SGD", device, None, **options)


ADAGRAD = [
    {},
    {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-4, "maximize": True},
]


@pytest.mark.parametrize("options", ADAGRAD)
def test_adagrad(options, device):
    run("Adagrad", device, None, **options)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9)}, {"weight_decay": 0.5, "eps": 1e-4}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "weight_decay": 0.1, "maximize": True}),
        ("Adagrad", {"lr_decay": 0.5}, {"weight_decay": 0.1, "eps": 1e-2}),
    ],
)
def test_groups_differ_in_every_option(name, first, second, device):
    run(name, device, (first, second), lr=1e-2)


def test_lion_follows_its_formula(device):
    (param,) = [torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(1)))]
    optimizer = smartinf.Lion([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, devices=[device])
    weights, momentum = param.detach().clone().double(), torch.zeros(100, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        param.grad = torch.randn(100, generator=generator)
        gradient = param.grad.double()
        weights *= 1 - 0.01 * 0.1
        weights -= 0.01 * torch.sign(0.9 * momentum + 0.1 * gradient)
        momentum = 0.99 * momentum + 0.01 * gradient
        optimizer.step()
        assert torch.allclose(param.double(), weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_random_models_and_schedules(seed, device):
    """Whole training: a model of random widths, a scheduler, clipping, accumulation."""
    rng = random.Random(seed)
    widths = [8, *(rng.randrange(3, 70) for _ in range(rng.randrange(1, 4))), 4]

    def build():
        torch.manual_seed(seed)
        layers = []
        for a, b in zip(widths, widths[1:], strict=False):
            layers += [torch.nn.Linear(a, b), torch.nn.LayerNorm(b), torch.nn.GELU()]
        return torch.nn.Sequential(*layers)

    ours, theirs = build(), build()
    lr, clip = rng.choice([1e-3, 1e-2]), rng.choice([None, 0.1, 1.0])
    optimizer = smartinf.AdamW(ours.named_parameters(), lr=lr, max_grad_norm=clip, devices=[device])
    reference = torch.optim.AdamW(theirs.named_parameters(), lr=lr)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=lr, total_steps=30, cycle_momentum=True)
        for o in (optimizer, reference)
    ]
    generator = torch.Generator().manual_seed(seed)
    for step in range(30):
        for _ in range(2):
            x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
            losses = [torch.nn.functional.mse_loss(model(x), y) / 2 for model in (ours, theirs)]
            for loss in losses:
                loss.backward()
        # Differences of rounding grow with training; 1e-4 is far below what any mistake makes.
        assert torch.allclose(losses[0], losses[1], rtol=1e-4), f"step {step}"
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or float("inf"))
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-3)
        for schedule in schedules:
            schedule.step()
        optimizer.zero_grad()
        reference.zero_grad()
