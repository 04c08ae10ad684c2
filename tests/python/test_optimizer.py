"""What a torch optimizer must stand: kinds of parameters, hooks, closures, scalers, accumulation."""

import copy
import re

import pytest
import torch

import smartinf


def pair(device, build, **options):
    """(our model, our optimizer, torch's model, torch's optimizer) with equal weights."""
    torch.manual_seed(3)
    ours = build()
    torch.manual_seed(3)
    theirs = build()
    max_norm = options.pop("max_grad_norm", None)
    storage = {k: options.pop(k) for k in list(options) if k not in ("lr", "weight_decay")}
    if max_norm:
        storage["max_grad_norm"] = max_norm
    return (
        ours,
        smartinf.AdamW(ours.parameters(), **options, devices=[device], **storage),
        theirs,
        torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **options),
    )


def assert_close(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-5, atol=2e-6)


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.GELU(), torch.nn.Linear(30, 10))


def data(step):
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(step))


def test_frozen_tied_and_unused_parameters(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(11, 10)
            self.body = mlp()
            self.unused = torch.nn.Linear(4, 4)
            self.frozen = torch.nn.Linear(10, 10).requires_grad_(False)
            self.head = torch.nn.Linear(10, 11, bias=False)
            self.head.weight = self.embed.weight
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return self.head(self.frozen(self.body(self.embed(x))))

    ours, optimizer, theirs, reference = pair(device, Model, lr=1e-2)
    x = torch.arange(11)
    for _ in range(4):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x), x).backward()
            opt.step()
    assert ours.head.weight is ours.embed.weight
    assert_close(ours, theirs)
    ours.frozen.weight.requires_grad_(True)
    ours(x).sum().backward()
    with pytest.raises(smartinf.UsageError, match="was frozen"):
        optimizer.step()


def test_several_types_and_strides(device):
    """f32, bf16 and f16 in one optimizer, one parameter channels-last, one transposed."""
    torch.manual_seed(0)
    base = [
        torch.randn(6, 7),
        torch.randn(33).bfloat16(),
        torch.randn(21).half(),
        torch.randn(4, 5, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(8, 9).t(),
    ]
    ours = [torch.nn.Parameter(t.clone(memory_format=torch.preserve_format)) for t in base]
    masters = [torch.nn.Parameter(t.float().clone()) for t in base]
    strides = [p.stride() for p in ours]
    optimizer = smartinf.AdamW(ours, lr=1e-2, devices=[device])
    reference = torch.optim.AdamW(masters, lr=1e-2)
    for _ in range(5):
        for p, m in zip(ours, masters, strict=True):
            p.grad = torch.randn(p.shape).to(p.dtype)
            m.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, m in zip(ours, masters, strict=True):
            # Rounded once from the master, which itself may differ in its last bits.
            tolerance = 2e-5 if p.dtype == torch.float32 else torch.finfo(p.dtype).eps
            assert torch.allclose(p.float(), m, rtol=tolerance, atol=1e-6)
    assert [p.stride() for p in ours] == strides


def test_what_cannot_be_optimized_is_named(device, tmp_path):
    with pytest.raises(smartinf.UsageError, match="complex"):
        smartinf.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))], devices=[device])
    with pytest.raises(smartinf.UsageError, match="float64"):
        smartinf.AdamW([torch.nn.Parameter(torch.zeros(3).double())], devices=[device])
    with pytest.raises(smartinf.UsageError, match="no device"):
        smartinf.AdamW(mlp().parameters())
    with pytest.raises(smartinf.UsageError, match="memory_budget"):
        smartinf.AdamW(mlp().parameters(), devices=[device], memory_budget="many")
    with pytest.raises(smartinf.UsageError, match="state_format"):
        smartinf.AdamW(mlp().parameters(), devices=[device], state_format="f64")
    with pytest.raises(smartinf.UsageError, match="master"):
        smartinf.AdamW(mlp().parameters(), devices=[device], master="q8")
    with pytest.raises(ValueError, match="beta"):
        smartinf.AdamW(mlp().parameters(), betas=(0.9, 1.0), devices=[device])
    with pytest.raises(ValueError, match="amsgrad"):
        smartinf.AdamW(mlp().parameters(), amsgrad=True, devices=[device])
    (tmp_path / "file").write_text("x")
    with pytest.raises(smartinf.Error, match="file"):
        smartinf.AdamW(mlp().parameters(), devices=[str(tmp_path / "file")])
    embedding = torch.nn.Embedding(5, 4, sparse=True)
    optimizer = smartinf.AdamW(embedding.parameters(), devices=[device])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(smartinf.UsageError, match="sparse"):
        optimizer.step()


def test_closure_hooks_and_scheduler(device):
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)]
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):

            def closure(model=model, opt=opt):
                opt.zero_grad()
                loss = model(data(step)).pow(2).mean()
                loss.backward()
                return loss

            assert opt.step(closure).item() > 0
        for schedule in schedules:
            schedule.step()
    assert called == ["before", "after"] * 3
    assert_close(ours, theirs)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("passes", [1, 3])
def test_accumulation_and_clipping(release, passes, device):
    ours, optimizer, theirs, reference = pair(
        device,
        mlp,
        lr=1e-2,
        release_gradients=release,
        accumulation_steps=passes if release else 1,
        max_grad_norm=0.05,
    )
    for step in range(4):
        for micro in range(passes):
            for model in (ours, theirs):
                (model(data(10 * step + micro)).pow(2).mean() / passes).backward()
            if release:
                assert all(p.grad is None for p in ours.parameters())
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizer.step()
        reference.step()
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        optimizer.zero_grad()
        reference.zero_grad()
    assert_close(ours, theirs)


def test_torchs_clipping_and_zeroed_gradients(device):
    """clip_grad_norm_ scales what step() then takes; gradients of zero are gradients."""
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad(set_to_none=False)
            if step != 1:
                model(data(step)).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            opt.step()
    assert optimizer._session.lineage.updates == 3
    assert_close(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("release", [False, True])
def test_parameters_on_cuda(release, device):
    """Copied through host memory; with autocast and GradScaler."""
    ours, optimizer, theirs, reference = pair(
        device, lambda: mlp().cuda(), lr=1e-2, release_gradients=release
    )
    for model, opt in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for step in range(4):
            opt.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(data(step).cuda()).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    assert all(p.is_cuda for p in ours.parameters())
    assert_close(ours, theirs)


def test_released_gradients_can_be_dropped(device):
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2, release_gradients=True)
    ours(data(5)).sum().backward()
    optimizer.zero_grad()
    for model, opt in ((ours, optimizer), (theirs, reference)):
        model(data(6)).pow(2).mean().backward()
        opt.step()
    assert_close(ours, theirs)
    ours(data(7)).sum().backward()
    with pytest.raises(smartinf.UsageError, match="accumulation_steps"):
        ours(data(7)).sum().backward()


def test_gradscaler_skips_overflow(device):
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            opt.zero_grad()
            scaler.scale(model(data(step)).pow(2).mean()).backward()
            if step == 2:
                next(model.parameters()).grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
    assert optimizer._session.lineage.updates == 3
    assert_close(ours, theirs)


@pytest.mark.parametrize("passes", [1, 2])
def test_gradscaler_and_released_gradients(passes, device):
    """Infinities are seen before the update, although p.grad is empty when the scaler looks."""
    ours, optimizer, theirs, reference = pair(
        device, mlp, lr=1e-2, release_gradients=True, accumulation_steps=passes, max_grad_norm=0.1
    )
    for model, opt in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            opt.zero_grad()
            for micro in range(passes):
                loss = model(data(10 * step + micro)).pow(2).mean() / passes
                scaler.scale(loss * float("inf") if step == 2 and micro == 0 else loss).backward()
            if opt is reference:
                scaler.unscale_(opt)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            assert opt is reference or all(p.grad is None for p in model.parameters())
        assert scaler.get_scale() == 2.0**11  # up, down, up
    assert optimizer._session.lineage.updates == 4
    assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert_close(ours, theirs)


def test_unscaling_released_gradients_is_refused(device):
    model = mlp()
    optimizer = smartinf.AdamW(model.parameters(), devices=[device], release_gradients=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(data(1)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(smartinf.UsageError, match="unscale_"):
        scaler.step(optimizer)


def test_non_finite_gradients(device, tmp_path):
    model = mlp()
    optimizer = smartinf.AdamW(model.named_parameters(), devices=[device])
    before = [p.detach().clone() for p in model.parameters()]
    model(data(1)).sum().backward()
    model[2].bias.grad[3] = float("nan")
    with pytest.raises(smartinf.NonFiniteGradientError, match=r"2\.bias"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.nonfinite = "skip"
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model[2].bias.grad[3] = 0
    optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


def test_add_param_group(device):
    model, added = mlp(), torch.nn.Linear(10, 10)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    optimizer.add_param_group({"params": [("early.weight", added.weight)], "lr": 1e-1})
    added(model(data(0))).pow(2).mean().backward()
    optimizer.step()
    moments = optimizer.full_state_dict()["state"][0]["exp_avg"].clone()
    optimizer.add_param_group({"params": [("late.bias", added.bias)], "lr": 1e-1})
    state = optimizer.full_state_dict()["state"]
    assert torch.equal(state[0]["exp_avg"], moments)
    optimizer.zero_grad()
    added(model(data(1))).pow(2).mean().backward()
    before = added.bias.detach().clone()
    optimizer.step()
    assert not torch.equal(before, added.bias)
    assert optimizer._session.lineage.steps[-1] == 1
    assert optimizer._session.lineage.steps[0] == 2


def test_compiled_model(device):
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2)
    compiled = torch.compile(ours, backend="aot_eager")
    for step in range(3):
        for model, opt in ((compiled, optimizer), (theirs, reference)):
            opt.zero_grad()
            model(data(step)).pow(2).mean().backward()
            opt.step()
    assert_close(ours, theirs)


def test_bf16_autocast(device):
    ours, optimizer, theirs, reference = pair(device, mlp, lr=1e-2)
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(data(step)).float().pow(2).mean()
            loss.backward()
            opt.step()
    assert_close(ours, theirs)


@pytest.mark.parametrize(("state_format", "master"), [("bf16", "f32"), ("q8", "f32"), ("q4", "m24"), ("f32", "bf16")])
def test_smaller_state_still_learns(state_format, master, device):
    model = mlp()
    optimizer = smartinf.AdamW(
        model.parameters(), lr=1e-2, devices=[device], state_format=state_format, master=master
    )
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(data(1)) - data(2)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("master", "kept"), [("m24", 24), ("bf16", 16)])
def test_parameters_are_the_stored_master_weights(master, kept, tmp_path):
    def train(steps, model, resume=None):
        with smartinf.AdamW(
            model.parameters(), lr=1e-2, devices=[tmp_path / "state"], master=master, state_format="q8", resume=resume
        ) as optimizer:
            for step in steps:
                values = torch.cat([p.detach().flatten() for p in model.parameters()])
                assert not bool((values.view(torch.int32) & ((1 << (32 - kept)) - 1)).any())
                optimizer.zero_grad()
                model(data(step)).pow(2).mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(1)
    first = mlp()
    whole = train(range(6), copy.deepcopy(first), resume=False)
    train(range(3), first, resume=False)
    resumed = train(range(3, 6), mlp(), resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    with pytest.raises(smartinf.MismatchError, match=rf"{master}\+q8, not q8"):
        smartinf.AdamW(mlp().parameters(), devices=[tmp_path / "state"], state_format="q8", resume=True)


def test_several_devices_and_budgets_give_the_same_bits(tmp_path):
    def wide():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(10, 20000), torch.nn.Tanh(), torch.nn.Linear(20000, 10))

    results = []
    for name, options in {
        "one": {},
        "three": {"devices": 3},
        "spilled": {"gradient_budget": 1},
        "host": {"where": "host"},
        "scratch": {"durability": "none"},
    }.items():
        count = options.pop("devices", 1)
        model = wide()
        devices = [str(tmp_path / f"{name}{d}") for d in range(count)]
        optimizer = smartinf.AdamW(model.parameters(), devices=devices, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(data(step)).pow(2).mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
        assert len(optimizer.describe_devices()) == count
        optimizer.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def parameter(count=100):
    return torch.nn.Parameter(torch.linspace(-1, 1, count))


@pytest.mark.parametrize(
    "kind", [smartinf.AdamW, smartinf.Adam, smartinf.SGD, smartinf.Adagrad, smartinf.Lion]
)
def test_keywords_of_torchs_loops(kind, tmp_path):
    """What chooses among torch's own loops changes nothing; what would change meaning is refused."""
    params, results = [], []
    for i, keywords in enumerate(
        ({}, {"fused": True, "foreach": False, "capturable": False, "differentiable": False}, {"foreach": True})
    ):
        params.append(parameter())
        with kind([params[-1]], lr=1e-2, devices=[str(tmp_path / str(i))], **keywords) as optimizer:
            params[-1].grad = torch.ones_like(params[-1])
            optimizer.step()
        results.append(params[-1].detach().clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    for keyword in ("capturable", "differentiable"):
        with pytest.raises(smartinf.UsageError, match=f"{keyword}=True is not supported"):
            kind([parameter()], devices=[str(tmp_path / "other")], **{keyword: True})
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) .*'device'; did you mean 'devices'"):
        kind([parameter()], device=str(tmp_path / "other"))
    with pytest.raises(TypeError, match="'weight_deacy'; did you mean 'weight_decay'"):
        kind([parameter()], devices=[str(tmp_path / "other")], weight_deacy=0.1)
    assert not (tmp_path / "other").exists()


def test_a_budget_that_is_too_small_says_what_is_enough(device):
    with pytest.raises(smartinf.MemoryLimitError, match="budget of 1000 B is too small for 1 device") as raised:
        smartinf.AdamW([parameter()], devices=[device], memory_budget="1KB")
    enough = re.search(r"at least ([\d.]+ MiB)", str(raised.value))[1]
    with smartinf.AdamW([parameter()], devices=[device], memory_budget=enough):
        pass


def test_a_with_block_closes(device):
    with smartinf.AdamW([parameter()], devices=[device]) as optimizer:
        assert optimizer._session.core is not None
    assert optimizer._session.core is None
    with pytest.raises(ZeroDivisionError), smartinf.AdamW([parameter()], devices=[device], resume=True):
        1 / 0  # noqa: B018
    smartinf.AdamW([parameter()], devices=[device], resume=True).close()


@pytest.mark.parametrize("resume", [True, False])
def test_devices_that_this_process_holds(resume, device, tmp_path):
    first = smartinf.AdamW([parameter()], devices=[device])
    (tmp_path / "link").symlink_to(device)
    with pytest.raises(smartinf.DeviceError, match=r"another optimizer of this process.*close\(\)") as raised:
        smartinf.AdamW([parameter()], devices=[str(tmp_path / "link")], resume=resume)
    assert (raised.value.code, raised.value.path) == ("busy", str(tmp_path / "link"))
    first.close()
    smartinf.AdamW([parameter()], devices=[device], resume=resume)


def test_released_gradients_that_nobody_clips_are_told_once(tmp_path, caplog):
    def steps(name, **options):
        caplog.clear()
        param = parameter()
        with smartinf.AdamW([param], devices=[str(tmp_path / name)], **options) as optimizer:
            for _ in range(2):
                param.pow(2).sum().backward()
                torch.nn.utils.clip_grad_norm_([param], 1.0)
                optimizer.step()
        return caplog.text.count("no gradient is clipped")

    assert steps("a", release_gradients=True) == 1
    assert steps("b", release_gradients=True, max_grad_norm=1.0) == 0
    assert steps("c", release_gradients=True, max_grad_norm=float("inf")) == 0
    assert steps("d") == 0


@pytest.mark.parametrize("clear", ["optimizer", "model", "nothing", "a part"])
def test_zero_grad_drops_released_gradients(clear, device):
    """After a backward that broke off in the second of two passes, as with gradients that are held."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if breaks:
                raise RuntimeError("out of memory")
            return gradient

    def run(make):
        torch.manual_seed(1)
        model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        optimizer, x = make(model), torch.randn(6, 4, requires_grad=True)

        def passes(begin):
            for k in (begin, begin + 1):
                breaks[:] = [k] if k == 1 else []
                model[1](Breaks.apply(model[0](x[k]))).square().mean().backward()

        with pytest.raises(RuntimeError, match="out of memory"):
            passes(0)
        breaks.clear()
        {"optimizer": optimizer, "model": model, "a part": model[1], "nothing": torch.nn.Identity()}[clear].zero_grad()
        passes(2)
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    breaks = []
    made = []

    def ours(model):
        made.append(
            smartinf.AdamW(
                model.named_parameters(), devices=[device], release_gradients=True, accumulation_steps=2, max_grad_norm=0
            )
        )
        return made[0]

    if clear in ("optimizer", "model"):
        for a, b in zip(run(ours), run(lambda model: torch.optim.AdamW(model.parameters())), strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        return
    with pytest.raises(smartinf.UsageError, match=r"call zero_grad\(\) of the optimizer|Call zero_grad\(\) of the optimizer"):
        run(ours)
