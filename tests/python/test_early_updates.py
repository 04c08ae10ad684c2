"""overlap="early": what an update that begins before step() can run into, and that nothing of it is seen."""

import copy
import sys

import pytest
import torch
import torch.utils.checkpoint
from test_overlap import WIDTH, Model, assert_same, loss_of, make, run, tokens, train

import smartinf


IN_THE_MIDDLE = 400_000  # an element of a subgroup whose gradients are all made before those of body.4


def weights(model):
    """Of the tensors themselves: nothing is waited for."""
    return {name: value.detach().clone() for name, value in Model.named_parameters(model)}


def assert_weights(model, expected):
    for name, value in Model.named_parameters(model):
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def stepped(device):
    """(model, optimizer, its weights) after two steps, with an overlap of "early"."""
    model, optimizer = make(device, "early")
    train(model, optimizer, range(2))
    optimizer.wait_weights()
    return model, optimizer, weights(model)


def backward(model, optimizer, step=2):
    loss_of(model, tokens(step)).backward()
    optimizer._session.begin_step()  # not after the commit of the step before, which may take longer than backward
    optimizer._session.gradients._put_complete(optimizer._session)
    assert optimizer._session.late.early


def goes_on(model, optimizer, device, steps):
    """The bits of a run without overlap; two steps are made."""
    reference, other = make(device + "_reference")
    train(reference, other, range(2))
    assert train(model, optimizer, steps) == train(reference, other, steps)


def test_weights_change_before_step(stepped):
    model, optimizer, _ = stepped
    there = optimizer._session.layout.flat
    before = there.clone()
    backward(model, optimizer)
    optimizer._session.core.wait_weights(IN_THE_MIDDLE, 1)
    assert not torch.equal(there, before)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_leaves_the_weights(device, nonfinite):
    model, optimizer = make(device, "early", nonfinite=nonfinite)
    losses = train(model, optimizer, range(2))
    optimizer.wait_weights()
    before = weights(model)
    for _ in range(2):
        # Of the parameter that backward completes last: others have been updated by then.
        (loss_of(model, tokens(2)) + (model.embed.weight * float("inf")).sum() * 0).backward()
        if nonfinite == "raise":
            with pytest.raises(smartinf.NonFiniteGradientError, match="embed.weight"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        assert_weights(model, before)
    losses += train(model, optimizer, range(2, 5))
    reference, other = make(device + "_reference")
    assert losses == train(reference, other, range(5))


USES = {
    "forward": lambda model, optimizer: model(tokens(9)),
    "a layer's forward": lambda model, optimizer: model.body[3](torch.zeros(1, WIDTH)),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(Model().state_dict()),
    "a copy": lambda model, optimizer: copy.deepcopy(model),
    "a moving average": lambda model, optimizer: torch.optim.swa_utils.AveragedModel(model),
    "to": lambda model, optimizer: model.double(),
    "wait_weights": lambda model, optimizer: optimizer.wait_weights(),
    "save_checkpoint": lambda model, optimizer: optimizer.save_checkpoint("/nowhere"),
    "full_state_dict": lambda model, optimizer: optimizer.full_state_dict(),
    "add_param_group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [("more", torch.nn.Parameter(torch.zeros(3)))]}
    ),
}


@pytest.mark.parametrize("use", USES)
def test_between_backward_and_step_nobody_uses_weights(stepped, use, device):
    model, optimizer, _ = stepped
    backward(model, optimizer)
    with pytest.raises(smartinf.UsageError, match=r"step\(\)"):
        USES[use](model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # looks at gradients
    optimizer.step()
    optimizer.zero_grad()
    reference, other = make(device + "_reference")
    train(reference, other, range(3))
    assert train(model, optimizer, range(3, 5)) == train(reference, other, range(3, 5))


def test_zero_grad_and_close_bring_the_weights_back(stepped, device):
    model, optimizer, before = stepped
    backward(model, optimizer)
    optimizer.zero_grad()
    assert_weights(model, before)
    goes_on(model, optimizer, device, range(2, 4))
    optimizer.wait_weights()
    before = weights(model)
    backward(model, optimizer, 5)
    optimizer.close()
    assert_weights(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_backward_that_ends_in_the_middle(stepped, device, error):
    model, optimizer, before = stepped

    def stop(_):
        raise error("stopped")

    hook = model.body[2].weight.register_hook(stop)
    with pytest.raises(error):
        loss_of(model, tokens(2)).backward()
    hook.remove()
    optimizer.zero_grad()
    assert_weights(model, before)
    goes_on(model, optimizer, device, range(2, 4))


def test_a_device_that_fails_in_backward(stepped, device):
    model, optimizer, before = stepped

    class Fails:
        def __init__(self, core):
            self.core = core

        def __getattr__(self, name):
            return getattr(self.core, name)

        def put_gradients(self, ranges, *rest):
            if ranges == [5]:
                optimizer._session.core = self.core
                raise smartinf.DeviceError("it failed")
            self.core.put_gradients(ranges, *rest)

    optimizer.synchronize()
    optimizer._session.core = Fails(optimizer._session.core)
    with pytest.raises(smartinf.DeviceError, match="it failed"):
        backward(model, optimizer)
    optimizer.zero_grad()
    assert_weights(model, before)
    goes_on(model, optimizer, device, range(2, 4))


def test_a_second_backward_before_step_is_refused(stepped, device):
    model, optimizer, before = stepped
    optimizer.synchronize()
    loss = loss_of(model, tokens(2))
    loss.backward(retain_graph=True)
    with pytest.raises(smartinf.UsageError, match="has changed since this forward|a second gradient of"):
        loss.backward()
    optimizer.zero_grad()
    assert_weights(model, before)
    goes_on(model, optimizer, device, range(2, 4))


class Twice(Model):
    """Every layer is used twice, in parts that are computed again one after the other."""

    def forward(self, x):
        h = self.embed(x)
        for _ in range(2):
            for i in range(12):
                if self.checkpoint is None:
                    h = self.layer(i, h)
                else:
                    h = torch.utils.checkpoint.checkpoint(self.layer, i, h, use_reentrant=self.checkpoint)
        return self.head(h)


@pytest.mark.parametrize("checkpoint", [None, False])
def test_modules_that_are_used_twice(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr("test_overlap.Model", Twice)
    options = {"release_gradients": True, "max_grad_norm": 0, "checkpoint": checkpoint, "steps": range(4)}
    expected, _, _ = run(tmp_path, None, **options)
    made, _, _ = run(tmp_path, "early", **options)
    assert_same(made, expected)


def test_parts_that_are_computed_again_one_by_one_are_refused_by_name(device, monkeypatch):
    """With use_reentrant=True each part makes its own gradient of what both use: the first is not all of it."""
    monkeypatch.setattr("test_overlap.Model", Twice)
    model, optimizer = make(device, "early", checkpoint=True)
    before = weights(model)
    with pytest.raises(smartinf.UsageError, match=r"body.11.weight|a second gradient of body"):
        loss_of(model, tokens(0)).backward()
    optimizer.zero_grad()
    assert_weights(model, before)


class TiedInPart(Model):
    """The head, which shares its weight with the embedding, is computed again in backward."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.head, self.embed(x) * self.scale, use_reentrant=True)


def test_a_shared_weight_of_which_one_use_is_computed_again_is_refused_by_name(device, monkeypatch):
    monkeypatch.setattr("test_overlap.Model", TiedInPart)
    model, optimizer = make(device, "early")
    before = weights(model)
    with pytest.raises(smartinf.UsageError, match="a second gradient of embed.weight"):
        loss_of(model, tokens(0)).backward()
    optimizer.zero_grad()
    assert_weights(model, before)


def test_gradscaler(device):
    runs = []
    for overlap in (None, "early"):
        model, optimizer = make(f"{device}{overlap}", overlap, release_gradients=True, max_grad_norm=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
        losses, wrong = [], []
        for step in range(9):
            loss = loss_of(model, tokens(step))
            losses.append(loss.item())
            if step == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            wrong.append(optimizer.wrong_guess)
        runs.append((losses, scaler.get_scale(), {n: p.clone() for n, p in model.named_parameters()}))
    assert runs[0][:2] == runs[1][:2]
    for name, value in runs[0][2].items():
        assert torch.equal(value, runs[1][2][name])
    assert 0 < sum(wrong[1:]) < len(wrong[1:])  # also after the scale has changed


def test_groups_closures_and_schedules(tmp_path):
    """A group of lr 0, one that has a gradient in some steps only, a learning rate that changes between backward and
    step(), a closure, a group that is added."""
    runs, late = [], []
    for overlap in (None, "late", "early"):
        torch.manual_seed(5)
        model = Model()
        named = dict(model.named_parameters())
        groups = [
            {"params": [named.pop("scale")], "param_names": ["scale"], "lr": 0.0},
            {"params": [p for n, p in named.items() if "body.3" in n], "param_names": ["w", "b"]},
            {"params": [p for n, p in named.items() if "body.3" not in n]},
        ]
        groups[2]["param_names"] = [n for n in named if "body.3" not in n]
        extra = torch.nn.Linear(WIDTH, WIDTH)
        model.extra = extra
        options = {"overlap": overlap, "model": model} if overlap else {}
        optimizer = smartinf.AdamW(
            groups, lr=1e-3, devices=[str(tmp_path / f"{overlap}")], release_gradients=True, max_grad_norm=0, **options
        )
        losses = []
        for step in range(8):
            model.body[3].requires_grad_(step % 3 != 1)

            def closure():
                loss = loss_of(model, tokens(step))
                loss.backward()
                if step == 5:
                    optimizer.param_groups[2]["lr"] = 3e-4
                return loss

            losses.append(optimizer.step(closure).item())
            optimizer.zero_grad()
            late.append((overlap, optimizer.wrong_guess))
            if step == 3:
                optimizer.add_param_group({"params": list(extra.parameters()), "param_names": ["e", "f"]})
        runs.append((losses, {n: p.clone() for n, p in model.named_parameters()}))
    for other in runs[1:]:
        assert other[0] == runs[0][0]
        for name, value in runs[0][1].items():
            assert torch.equal(value, other[1][name]), name
    assert ("early", True) in late
    assert ("early", False) in late


def test_killed_in_backward_and_resumed(processes, device):
    """Half of the layers have been updated; none of it is there after the kill."""
    code = f"""
    import os, sys
    sys.path.insert(0, {str(sys.path[0])!r})
    import torch
    from test_overlap import make, train

    model, optimizer = make({device!r}, "early")
    losses = train(model, optimizer, range(3))
    print(*[loss.hex() for loss in losses], flush=True)
    optimizer.synchronize()

    def die(_):
        optimizer._session.core.wait_weights({IN_THE_MIDDLE}, 1)
        os._exit(9)

    model.body[4].weight.register_hook(die)
    train(model, optimizer, range(3, 4))
    """
    done = processes.run(code)
    assert done.returncode == 9, done.stderr
    losses = [float.fromhex(word) for word in done.stdout.split()]
    model, optimizer = make(device, "early", resume=True)
    losses += train(model, optimizer, range(3, 6))
    reference, other = make(device + "_reference")
    assert losses == train(reference, other, range(6))


def test_a_compiled_model(device):
    model, optimizer = make(device, "early")
    compiled = torch.compile(model, backend="eager")
    reference, other = make(device + "_reference")
    assert train(compiled, optimizer, range(3)) == train(reference, other, range(3))


def test_what_early_updates_cannot_be_is_named(device):
    with pytest.raises(smartinf.UsageError, match='overlap="early".*durability "none"'):
        make(device, "early", durability="none")
    model, optimizer = make(device, "auto", durability="none", resume=False, release_gradients=True, max_grad_norm=0)
    train(model, optimizer, range(3))
    assert optimizer.overlap == "late"
