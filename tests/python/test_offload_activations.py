"""smartinf.offload_activations: the bits of a plain run, in every way in which autograd uses what it has saved."""

import logging
import os
import resource
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import smartinf
from smartinf import _core
from smartinf.activations import KeepRule

WIDTH, ROWS = 128, 256  # 128 KiB for each activation


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # views of one storage
        return x + self.dropout(self.out(torch.tanh(q) * torch.sigmoid(k.t().contiguous().t()) * (v * 2).relu_()))


class Model(nn.Module):
    def __init__(self, depth=6, recompute=None):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x


def data(seed=2, grad=False):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def loss_of(model, seed=2):
    torch.manual_seed(seed)  # of dropout
    return model(data(seed, grad=True)).square().mean()


def gradients(model):
    taken = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return taken


def plain(seeds=(2,), **options):
    model = Model(**options)
    losses = [loss_of(model, seed) for seed in seeds]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], gradients(model)


def assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small, and other tests may have the other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offload(device):
    """smartinf.offload_activations with buffers for a part of what the model saves."""
    return lambda model, **options: smartinf.offload_activations(
        model, device, **({"memory_budget": "1MiB", "storage": "64MiB", "keep": 0} | options)
    )


@pytest.mark.parametrize("keep", ["auto", 0, 0.5, 1, "1MiB"])
def test_losses_and_gradients_have_the_bits_of_the_plain_run(offload, device, keep):
    losses, wanted = plain()
    model = Model()
    with offload(model, keep=keep) as activations:
        for _ in range(3):
            loss = loss_of(model)
            loss.backward()
            assert torch.equal(loss.detach(), losses[0])
            assert_same(gradients(model), wanted)
    counts = activations.counts
    assert counts.written_bytes + counts.kept_bytes == counts.saved_bytes > 6 << 20
    assert os.listdir(device) == []
    if keep == 0:
        assert counts.kept_bytes == 0
        assert counts.read_bytes > 0
        assert counts.handed_over_bytes > 0
        assert counts.read_bytes + counts.handed_over_bytes >= counts.saved_bytes
    if keep == 1:
        assert counts.written_bytes == 0
    if keep == 0.5:
        assert abs(counts.kept_bytes / counts.saved_bytes - 0.5) < 0.1


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_recomputation_only_the_inputs_of_checkpoints_are_saved(offload, reentrant):
    _, wanted = plain()
    model = Model(recompute=reentrant)
    with offload(model) as activations:
        loss_of(model).backward()
    assert_same(gradients(model), wanted)
    # The input of each block, and what the loss needs.
    assert activations.counts.saved_bytes <= (len(model.blocks) + 2) * ROWS * WIDTH * 4


def test_each_storage_is_written_once(offload):
    x = data(grad=True)
    model = nn.Identity()
    with offload(model) as activations:
        h = x * 1
        y = (h * h).sum() + h.t().sin().sum()
        y = y + (h[: ROWS // 2].cos() * h[ROWS // 2 :]).sum()
        saved = activations.counts.saved_bytes
        y.backward()
    # h in all its views, and the cosines of one half.
    assert saved == ROWS * WIDTH * 4 * 3 // 2


def test_parameters_buffers_and_small_tensors_stay(offload):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(data())
            self.register_buffer("scale", data(3))

        def forward(self, x):
            return (x * self.weight * self.scale.t().t()).sum()  # saves all three

    with offload(Scaled()) as activations:
        for _ in range(2):
            activations._model(torch.ones(1, WIDTH, requires_grad=True)).backward()
    assert activations.counts.saved_bytes == 0


def test_a_graph_can_be_gone_through_twice_and_not_a_third_time(offload):
    _, wanted = plain()
    model = Model()
    with offload(model):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        assert_same(gradients(model), wanted)
        loss.backward()
        assert_same(gradients(model), wanted)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_several_graphs_are_in_flight(offload):
    seeds = (2, 3, 4)
    losses, wanted = plain(seeds)
    model = Model()
    with offload(model):
        ours = [loss_of(model, seed) for seed in seeds]
        for loss in ours:
            loss.backward()
    assert_same([loss.detach() for loss in ours], losses)
    assert_same(gradients(model), wanted)


def test_backward_comes_after_the_context_was_left(offload, device):
    _, wanted = plain()
    model = Model()
    with offload(model) as activations:
        loss = loss_of(model)
    loss.backward()
    assert_same(gradients(model), wanted)
    assert activations.counts.read_bytes > 0
    del loss
    assert open_files(device) == []


def open_files(device):
    files = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return [os.readlink(file) for file in files if os.path.lexists(file) and device in os.readlink(file)]


def test_an_exception_in_forward_leaves_nothing_behind(offload, device):
    _, wanted = plain()
    model = Model()
    activations = offload(model)
    with pytest.raises(ValueError, match="mine"), activations:
        tensors = activations._tensors
        loss_of(model)
        raise ValueError("mine")
    assert open_files(device) == []
    del tensors
    with activations:  # once more
        loss_of(model).backward()
    assert_same(gradients(model), wanted)


def test_what_backward_never_wants_is_dropped(offload):
    _, wanted = plain()
    model = Model()
    with offload(model) as activations:
        for _ in range(3):
            unused = loss_of(model)
            part = torch.autograd.grad(loss_of(model), model.blocks[-1].out.weight)
            assert torch.equal(part[0], wanted[-2])
        del unused
        loss_of(model).backward()
        assert activations._tensors._spool.counts()["used_max"] < 64 << 20
    assert_same(gradients(model), wanted)


def test_a_change_after_saving_is_refused_as_torch_does(offload):
    for change_weight in (False, True):
        model = Model(depth=1)
        with offload(model):
            hidden = model.blocks[0](data(grad=True)) * 1
            loss = hidden.square().sum()
            with torch.no_grad():
                (model.blocks[0].out.weight if change_weight else hidden).add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_storage_that_was_changed_in_between_is_saved_anew(offload):
    def compute(x):
        h = x * 1
        a = (h * 1).sin()
        product = h.detach() * x  # saves h as it is now
        with torch.no_grad():
            h.add_(1)
        return a.sum(), (h.detach() * x).sum(), product

    x = data(grad=True)
    with offload(nn.Identity()):
        first, second, product = compute(x)
        (first + second).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
    expected = data(grad=True)
    first, second, _ = compute(expected)
    (first + second).backward()
    assert torch.equal(x.grad, expected.grad)


def test_gradients_of_gradients_have_the_same_bits(offload):
    def penalty(model):
        x = data(grad=True)
        torch.manual_seed(5)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [x.grad, *gradients(model)]

    wanted = penalty(Model())
    model = Model()
    with offload(model) as activations:
        assert_same(penalty(model), wanted)
    assert activations.counts.written_bytes > 0


def test_backward_on_another_thread_and_one_graph_each(offload):
    from concurrent.futures import ThreadPoolExecutor

    _, wanted = plain((2, 3))
    model = Model()
    with offload(model):
        losses = [loss_of(model, seed) for seed in (2, 3)]
        with ThreadPoolExecutor(2) as threads:
            found = [threads.submit(torch.autograd.grad, loss, list(model.parameters())) for loss in losses]
            parts = [future.result() for future in found]
    assert_same([a + b for a, b in zip(*parts, strict=True)], wanted)


def test_other_types_and_shapes_come_back_as_they_were(offload):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            nonlocal back
            back = ctx.saved_tensors
            return grad, *[None for _ in back]

    back = None
    base = data()
    given = [
        base.to(torch.bfloat16),
        base.to(torch.complex64).t(),
        torch.view_as_complex(data().reshape(-1, 2)).conj(),
        base.expand(3, ROWS, WIDTH),
        base[::2, 3:17],
        (base > 0),
        torch.randint(1000, (ROWS, WIDTH)),
        base.to_sparse(),
        data().as_strided((ROWS, 3), (WIDTH, 0), 5),
        torch.empty(0),
    ]
    with offload(nn.Identity()) as activations:
        out = Keep.apply(torch.ones(1, requires_grad=True), *given)
        out.backward()
    assert activations.counts.written_bytes > 0
    for old, new in zip(given, back, strict=True):
        assert (old.dtype, old.shape, old.layout) == (new.dtype, new.shape, new.layout)
        assert old.layout is not torch.strided or old.stride() == new.stride()
        assert torch.equal(old.to_dense(), new.to_dense())


def test_what_the_devices_have_no_room_for_stays_with_a_warning(offload, caplog):
    _, wanted = plain()
    model = Model()
    with offload(model, storage="512KiB") as activations, caplog.at_level(logging.WARNING, "smartinf"):
        loss_of(model).backward()
    assert_same(gradients(model), wanted)
    assert activations.counts.kept_bytes > 0
    assert sum("stays in memory" in message for message in caplog.messages) == 1


def test_a_drive_that_fails_is_named_and_the_next_run_is_right(offload, device):
    _, wanted = plain()
    model = Model()
    activations = offload(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(smartinf.DeviceError, match=device), activations:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # of what is written behind 1 MiB
            loss_of(model).backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert open_files(device) == []
    model.zero_grad()
    with activations:
        loss_of(model).backward()
    assert_same(gradients(model), wanted)


def test_wrong_options_are_refused_with_what_to_do(device):
    model = Model(depth=1)
    for options in ({"keep": "all"}, {"keep": -1}, {"keep": True}, {"memory_budget": "much"}):
        with pytest.raises(smartinf.UsageError):
            smartinf.offload_activations(model, device, **options)
    with pytest.raises(smartinf.UsageError, match="model"):
        smartinf.offload_activations(None, device)
    with pytest.raises(smartinf.UsageError, match="directory"), smartinf.offload_activations(model, []):
        pass
    smartinf.AdamW(model.parameters(), devices=[device]).close()
    before = sorted(os.listdir(device))
    with pytest.raises(smartinf.MismatchError, match="a directory of their own"):
        smartinf.offload_activations(model, device).__enter__()
    assert sorted(os.listdir(device)) == before


def test_the_keep_rule_sends_what_backward_has_time_for():
    class Step:
        def __init__(self):
            self.now = 0.0
            self.rule = KeepRule("auto", clock=lambda: self.now)
            self.counts = smartinf.activations.Counts()

        def run(self, waited):
            """100 tensors of 1 MB; backward takes 2 s, and waits beside that."""
            self.rule.step_begins(self.counts)
            away = 0
            for _ in range(100):
                went = self.rule.offload(10**6)
                self.rule.stored(10**6, not went)
                away += went
            self.now += 1
            self.rule.brought_back()
            self.now += 2 + waited(away)
            self.rule.brought_back()
            self.counts.waited_s += waited(away)
            self.counts.read_bytes += away * 10**6
            self.counts.saved_bytes += 10**8
            self.counts.written_bytes += away * 10**6
            self.rule.step_ended(self.counts)
            return away

    fast = Step()
    assert [fast.run(lambda away: 0.0) for _ in range(4)] == [100] * 4
    slow = Step()  # 25 of them a second
    runs = [slow.run(lambda away: max(0.0, away / 25 - 2)) for _ in range(4)]
    assert runs[:2] == [100, 100]  # nothing is concluded from the first step
    assert 45 <= runs[2] <= 50
    assert runs[3] == runs[2]


def test_the_decision_is_one_line_of_the_log_and_nothing_is_printed(offload, caplog, capfd):
    model = Model()
    with caplog.at_level(logging.INFO, "smartinf"), offload(model, keep="auto"):
        for _ in range(5):
            loss_of(model).backward()
    assert sum(message.startswith("activations:") for message in caplog.messages) == 1
    assert capfd.readouterr() == ("", "")


def test_an_optimizer_steps_within_the_context(offload, tmp_path):
    def train(context):
        model = Model(depth=2)
        optimizer = smartinf.AdamW(model.parameters(), lr=1e-3, devices=[str(tmp_path / f"state{context is None}")])
        for step in range(3):
            if context is None:
                loss_of(model, step).backward()
            else:
                with context(model):
                    loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [p.detach().clone() for p in model.parameters()]

    assert_same(train(offload), train(None))


def llama(transformers):
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
        )
    )


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("streamed", [False, True])
def test_transformers_models_with_and_without_checkpointing_and_streamed(tmp_path, monkeypatch, recompute, streamed):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from smartinf import streaming, units

    monkeypatch.setattr(units.find_units, "__defaults__", (None, 1 << 10))  # small ones, too
    monkeypatch.setattr(streaming, "_ENGINE_BYTES_MIN", 24 << 20)
    tokens = torch.randint(96, (4, 64), generator=torch.Generator().manual_seed(3))

    def train(name, context_of=None):
        model = llama(transformers)
        if streamed:
            model = smartinf.stream(model, str(tmp_path / name), memory_budget="64MiB", keep=0)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})
        devices = {} if streamed else {"devices": [str(tmp_path / name)]}
        optimizer = smartinf.AdamW(
            model.named_parameters(), lr=1e-2, max_grad_norm=1.0, subgroup_elements=65536, **devices
        )
        context = nullcontext() if context_of is None else context_of(model)
        seen = []
        with context:
            for _ in range(3):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append((loss.item(), optimizer.grad_norm))
        return seen, context

    expected, _ = train("plain")
    seen, context = train(
        "offloaded",
        lambda model: smartinf.offload_activations(
            model, tmp_path / "scratch", keep=0, memory_budget="1MiB", storage="64MiB"
        ),
    )
    assert seen == expected
    assert context.counts.written_bytes > 0
    if recompute is not None:  # inputs of layers, and what belongs to no layer
        assert context.counts.saved_bytes < 3 * 12 * tokens.numel() * 128 * 4


def test_an_open_core_lends_its_spool_and_takes_it_away_when_it_is_closed(device):
    _, wanted = plain()
    core = _core.Updater({"devices": [{"path": device}], "spool_bytes": 64 << 20}, ["weight"], [[1000]])
    model = Model()
    for _ in range(2):
        with smartinf.offload_activations(model, core, keep=0, memory_budget="1MiB") as activations:
            loss_of(model).backward()
            assert_same(gradients(model), wanted)
            assert activations.counts.read_bytes > 0
        assert core.spool().counts()["used"] == 0
    with pytest.raises(smartinf.UsageError, match="closed"), smartinf.offload_activations(model, core, keep=0):
        loss = loss_of(model)
        core.close()
        loss.backward()
    assert _core.Updater({"devices": [{"path": device}]}, ["weight"], [[1000]]).spool() is None


def test_the_interpreter_ends_with_a_graph_that_is_still_held(processes, device):
    program = (
        "import sys, torch, smartinf\n"
        "x = torch.randn(512, 512, requires_grad=True)\n"
        "with smartinf.offload_activations(torch.nn.Identity(), sys.argv[1], keep=0, storage='64MiB'):\n"
        "    y = (x * 2).sin().exp().sum()\n"
        "    z = (x * 2).sin().exp().sum()\n"
        "    z.backward()\n"
    )
    done = processes.run(program, device)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(device) == []
