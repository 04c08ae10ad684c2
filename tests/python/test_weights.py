"""Whose weights are trained: those the user gave, also where their storage is exchanged or written
behind the optimizer's back."""

import copy
import ctypes
import logging

import pytest
import torch
from test_state import build, train, weights

import smartinf
from smartinf import digest


def largest_difference(a, b):
    return max((x.float() - y.float()).abs().max().item() for x, y in zip(a, b, strict=True))


def used_device(device):
    """A device that holds a run of another model of the same shape."""
    torch.manual_seed(1)
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    saved = optimizer.state_dict()
    optimizer.close()
    return saved


# ---- State that lies on a device.


def test_a_state_dict_loaded_back_decides_nothing(device):
    used_device(device)
    model = build()
    given = weights(model)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(torch.equal(a, b) for a, b in zip(weights(model), given, strict=True))
    with pytest.raises(smartinf.UsageError, match=r"not taken over unasked.*resume=True.*resume=False"):
        train(model, optimizer, 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), given, strict=True))


def test_accelerate_does_not_take_an_old_run_over(device):
    accelerate = pytest.importorskip("accelerate")
    used_device(device)
    model = build()
    given = weights(model)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), given, strict=True))
    with pytest.raises(smartinf.UsageError, match="not taken over unasked"):
        train(model, optimizer, 0, 1)


def test_a_state_dict_that_was_saved_decides(device):
    saved = used_device(device)
    model = build()
    given = weights(model)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert largest_difference(weights(model), given) > 0.5
    train(model, optimizer, 3, 4)


def test_what_a_state_dict_refers_to_survives_being_loaded_back(device, tmp_path):
    saved = used_device(device)
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[str(tmp_path / "fresh")])
    optimizer.load_state_dict(saved)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(smartinf.MismatchError, match="refers to update 3"):
        train(model, optimizer, 0, 1)


# ---- Parameters whose storage is exchanged or written.


def as_undisturbed(device, disturb, exact=True, dtype=torch.float32):
    """Trains before and after `disturb(model)`, which changes no value; the weights must be those of a
    run without it."""
    model = build(dtype)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    before = weights(model)
    disturb(model)
    train(model, optimizer, 3, 8)
    assert largest_difference(weights(model), before) > 1e-3
    whole = build(dtype)
    other = smartinf.AdamW(whole.parameters(), lr=1e-2, devices=[device + "-whole"])
    train(whole, other, 0, 8)
    if exact:
        assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(whole), strict=True))
    return model, optimizer


def test_shared_memory_is_followed(device):
    model, _ = as_undisturbed(device, lambda model: model.share_memory())
    assert all(param.is_shared() for param in model.parameters())


def _nothing(model):
    sum(param.sum().item() for param in model.parameters())


def test_a_spawned_process_is_followed(device):
    def spawn(model):
        child = torch.multiprocessing.get_context("spawn").Process(target=_nothing, args=(model,))
        child.start()
        child.join(120)
        assert child.exitcode == 0

    as_undisturbed(device, spawn)


def test_parameters_in_shared_memory_stay_there(device):
    model = build().share_memory()
    same = [param.detach() for param in model.parameters()]  # as an actor sees them
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    given = [value.clone() for value in same]
    train(model, optimizer, 0, 3)
    assert all(param.is_shared() for param in model.parameters())
    assert largest_difference(same, given) > 1e-3
    assert largest_difference(same, weights(model)) == 0


def test_exchanged_data_is_followed(device):
    def exchange(model):
        for param in model.parameters():
            param.data = param.data.clone()

    as_undisturbed(device, exchange)


def test_another_type_is_followed(device):
    model, _ = as_undisturbed(device, lambda model: model.to(torch.bfloat16), exact=False)
    assert all(param.dtype == torch.bfloat16 for param in model.parameters())


@pytest.mark.parametrize("moved", [False, True])
def test_a_write_through_data_counts(device, moved):
    """As torch's AdamW sees it: the values are the new ones, the moments stay."""

    def disturb(model):
        if moved:
            model.share_memory()
        model[0].weight.data.zero_()
        model[2].weight.data.copy_(torch.full_like(model[2].weight, 0.25))

    model, reference = build(), build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train(reference, torchs, 0, 3)
    disturb(model)
    disturb(reference)
    train(model, optimizer, 3, 5)
    train(reference, torchs, 3, 5)
    assert largest_difference(weights(model), weights(reference)) < 1e-5


MIDDLE = slice(60, 140)  # rows of an embedding of 200, far from both its ends


def rows(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(200, 96), torch.nn.Linear(96, 5)).to(dtype)


def train_rows(model, optimizer, write, first, last):
    for step in range(first, last):
        ids = torch.randint(200, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(ids).float(), ids % 5).backward()
        optimizer.step()
        write(model[0].weight, step)
    return weights(model)


def by_data(weight, step):
    weight.data[MIDDLE] = 0.01 * step


def by_numpy(weight, step):
    weight.detach().numpy()[MIDDLE] = 0.01 * step


def swapped(weight, step):  # the same values elsewhere
    weight.data[[70, 71]] = weight.data[[71, 70]]


def clamped(weight, step):
    weight.data[MIDDLE].clamp_(-0.1, 0.1)


def one_value(weight, step):
    weight.data[100, 48] = step


def without_torch(weight, step):
    ctypes.memset(weight.data_ptr() + 4 * 96 * 100, 0, 4 * 96)


RELEASED = {"release_gradients": True, "max_grad_norm": 0}


@pytest.mark.parametrize("write", [by_data, by_numpy, swapped, clamped, one_value, without_torch])
@pytest.mark.parametrize("options", [{}, RELEASED, {"overlap": "late"}, RELEASED | {"overlap": "early"}])
def test_a_write_in_the_middle_counts(device, write, options):
    """As torch's AdamW has it, whatever torch's versions say."""
    model, reference = rows(), rows()
    given = options | ({"model": model} if "overlap" in options else {})
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device], **given)
    made = train_rows(model, optimizer, write, 0, 4)
    optimizer.close()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device], resume=True, **given)
    write(model[0].weight, 3)  # what came after the last step is not in the state
    made += train_rows(model, optimizer, write, 4, 6)
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    expected = train_rows(reference, torchs, write, 0, 4)
    expected += train_rows(reference, torchs, write, 4, 6)
    assert largest_difference(made, expected) < 1e-4


@pytest.mark.parametrize("layout", ["moved", "not contiguous", "another type"])
def test_a_write_in_the_middle_of_what_is_elsewhere_counts(device, layout):
    model, reference = rows(), rows()
    for each in (model, reference):
        if layout == "not contiguous":
            each[0].weight.data = each[0].weight.data.t().contiguous().t()
        if layout == "another type":
            each[1].double()
            each[0].bfloat16()
            each.insert(1, Cast())
    if layout == "another type":
        for each in (model, reference):
            each[2].float()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    if layout == "moved":
        model.share_memory()
    made = train_rows(model, optimizer, by_data, 0, 4)
    assert torch.equal(made[0][MIDDLE], torch.full_like(made[0][MIDDLE], 0.03))
    made = train_rows(model, optimizer, lambda *_: None, 4, 5)
    expected = train_rows(reference, torchs, by_data, 0, 4)
    expected = train_rows(reference, torchs, lambda *_: None, 4, 5)
    assert largest_difference(made, expected) < (0.05 if layout == "another type" else 1e-4)  # of bf16


class Cast(torch.nn.Module):
    def forward(self, x):
        return x.float()


def _write_rows(model):
    model[0].weight.data[MIDDLE] = 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_sees_each_value_and_its_place(dtype, monkeypatch):
    """What tells writes on other devices than the CPU; over several pieces here."""
    monkeypatch.setattr(digest, "_CHUNK", 1000)
    digest._factors.cache_clear()
    values = torch.randn(30, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = {digest.digest(values).item()}
    for change in (
        lambda t: t[17, 3].add_(1.0),
        lambda t: t[17].neg_(),
        lambda t: t[[4, 5]].flip(0),
        lambda t: torch.cat([t.view(-1)[1000:2000], t.view(-1)[:1000], t.view(-1)[2000:]]),  # pieces change places
    ):
        changed = values.clone()
        made = change(changed)
        if made.shape == (2, 70):
            changed[[4, 5]] = made
        seen.add(digest.digest(made if made.numel() == values.numel() else changed).item())
    assert len(seen) == 5
    assert digest.digest(values.clone()).item() in seen
    assert digest.digest(values.t().contiguous().t()).item() == digest.digest(values).item()
    digest._factors.cache_clear()


def test_a_write_of_another_process_counts(device):
    model, reference = rows().share_memory(), rows()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for trained, by in ((model, optimizer), (reference, torchs)):
        train_rows(trained, by, lambda *_: None, 0, 2)
    child = torch.multiprocessing.get_context("fork").Process(target=_write_rows, args=(model,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    _write_rows(reference)
    made = train_rows(model, optimizer, lambda *_: None, 2, 4)
    assert largest_difference(made, train_rows(reference, torchs, lambda *_: None, 2, 4)) < 1e-4


@pytest.mark.parametrize("overlap", [None, "late"])
def test_a_write_between_backward_and_step_counts_or_is_refused(device, overlap):
    """With released gradients the devices have the gradient already."""
    for options in ({}, RELEASED):
        model = rows()
        given = options | ({"overlap": overlap, "model": model} if overlap else {})
        optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device], resume=False, **given)
        train_rows(model, optimizer, lambda *_: None, 0, 2)
        optimizer.synchronize()
        ids = torch.arange(64)
        torch.nn.functional.cross_entropy(model(ids), ids % 5).backward()
        model[0].weight.data[MIDDLE] = 0.5
        if options:
            with pytest.raises(smartinf.UsageError, match=r"0\.weight was written between backward and step"):
                optimizer.step()
            train_rows(model, optimizer, lambda *_: None, 2, 3)
        else:
            optimizer.step()
        optimizer.wait_weights()
        assert (model[0].weight[MIDDLE] - 0.5).abs().max() < 0.05
        optimizer.close()


@pytest.mark.parametrize("how", ["save_checkpoint", "add_param_group"])
def test_a_write_after_the_last_step_is_kept(device, how, tmp_path):
    model = rows()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train_rows(model, optimizer, by_data, 0, 3)
    held = weights(model)
    if how == "add_param_group":
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(7)))]})
    else:
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        train_rows(model, optimizer, by_data, 3, 4)
        optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert largest_difference(weights(model), held) == 0


def test_another_shape_is_refused_by_name(device):
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 2)
    model[2].weight.data = torch.zeros(9, 50)
    model[2].bias.data = torch.zeros(9)
    model.zero_grad()
    with pytest.raises(smartinf.UsageError, match=r"parameter 2\.weight is \[9, 50\] now and was \[5, 50\]"):
        train(model, optimizer, 2, 3)


def test_a_step_that_moves_nothing_says_so(device, caplog):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), devices=[device])
    with caplog.at_level(logging.WARNING, "smartinf"):
        optimizer.step()
        optimizer.step()
    assert [record.message.count("changed nothing") for record in caplog.records] == [1]


# ---- State that a dict does not hold.


def test_torchs_optimizer_refuses_a_small_state_dict(device, tmp_path):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    small = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    for torchs in (torch.optim.AdamW(build().parameters()), torch.optim.Adagrad(build().parameters())):
        with pytest.raises(ValueError, match=r"no state is in this file.*full_state_dict\(\)"):
            torchs.load_state_dict(small)
    optimizer.load_state_dict(small)
    train(model, optimizer, 3, 4)
    full = torch.optim.AdamW(build().parameters())
    full.load_state_dict(optimizer.full_state_dict())
    optimizer.close()
    optimizer = smartinf.SGD(model.parameters(), lr=1e-2, devices=[device], resume=False)
    small = optimizer.state_dict()
    assert b"no state is in this file" in small["param_groups"][-1]["smartinf_note"]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        torch.optim.SGD(build().parameters()).load_state_dict(small)
    optimizer.load_state_dict(small)
    train(model, optimizer, 4, 5)


def test_a_state_dict_without_a_checkpoint_says_so_once(device, tmp_path, caplog):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    with caplog.at_level(logging.WARNING, "smartinf"):
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does before the first step
        assert not caplog.records
        train(model, optimizer, 0, 1)
        optimizer.state_dict()
        optimizer.state_dict()
    assert [record.message.count("holds no optimizer state") for record in caplog.records] == [1]
    optimizer.close()
    caplog.clear()
    other = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device], resume=True)
    with caplog.at_level(logging.WARNING, "smartinf"):
        other.save_checkpoint(tmp_path / "checkpoint")
        other.state_dict()
    assert not caplog.records


def test_state_by_parameter_is_refused_and_no_step_is_made_for_it(device):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 2)
    before = optimizer.full_state_dict()
    with pytest.raises(smartinf.UsageError, match="visit_full_state"):
        optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(smartinf.UsageError, match="on the devices"):
        optimizer.state[model[0].weight] = {}
    with pytest.raises(smartinf.UsageError, match="on the devices"):
        optimizer.state = {model[0].weight: {}}
    assert list(optimizer.state.items()) == []
    assert optimizer.state.get(model[0].weight) is None  # as torch's profiler asks
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    optimizer.zero_grad()
    with pytest.raises(smartinf.UsageError, match="save_checkpoint"):
        get_optimizer_state_dict(model, optimizer)  # makes a step where it finds no state
    after = optimizer.full_state_dict()
    assert after["state"][0]["step"] == before["state"][0]["step"]


def test_few_elements_leave_devices_out(tmp_path, caplog):
    model = build()
    devices = [str(tmp_path / "a"), str(tmp_path / "b")]
    with caplog.at_level(logging.INFO, "smartinf"):
        optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=devices)
    assert [record.message for record in caplog.records if devices[1] in record.message]
    train(model, optimizer, 0, 2)
    optimizer.close()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=devices, resume=True)
    train(model, optimizer, 2, 3)
    assert len(optimizer.describe_devices()) == 1


def test_sums_of_passes_are_exact_to_f32(device):
    """One large gradient and many small ones, of which bf16 sums would lose each."""
    param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = smartinf.SGD(
        [param], lr=1.0, devices=[device], release_gradients=True, accumulation_steps=65
    )
    for scale in (256.0, *[1.0] * 64):
        (param * scale).sum().backward()
    optimizer.step()
    assert torch.equal(param.detach().float(), torch.full((1000,), -320.0))


# ---- What cannot be optimized, or only as it is.


def test_sharding_wrappers_are_refused(device, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(smartinf.UsageError, match="ZeroRedundancyOptimizer cannot wrap"):
            ZeroRedundancyOptimizer(
                build().parameters(), optimizer_class=smartinf.AdamW, devices=[device]
            )
        param = torch.nn.Parameter(torch.zeros(8))
        param._is_flat_param = True  # as FullyShardedDataParallel marks it
        with pytest.raises(smartinf.UsageError, match="FullyShardedDataParallel"):
            smartinf.AdamW([param], devices=[device])
    finally:
        torch.distributed.destroy_process_group()


def _optimizer_of(rank, folder, answers):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        smartinf.AdamW([torch.nn.Parameter(torch.zeros(1000 + rank))], devices=[f"{folder}/d"])
    except smartinf.UsageError as error:
        answers.put(str(error))
    torch.distributed.destroy_process_group()


def test_ranks_with_different_parameters_are_refused(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_optimizer_of, args=(r, tmp_path, answers)) for r in range(2)]
    for rank in ranks:
        rank.start()
    assert all("different parameters" in answers.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(120)


def test_an_unfrozen_parameter_is_described(device):
    model = build()
    model[2].weight.requires_grad_(False)
    optimizer = smartinf.AdamW(model.parameters(), devices=[device])
    model[2].weight.requires_grad_(True)
    with pytest.raises(smartinf.UsageError, match=r"parameter number 2 of its group, of shape \[5, 50\],"):
        train(model, optimizer, 0, 1)
    optimizer.close()
    model[2].weight.requires_grad_(False)
    optimizer = smartinf.AdamW(model.named_parameters(), devices=[device], resume=False)
    model[2].weight.requires_grad_(True)
    with pytest.raises(smartinf.UsageError, match=r"parameter 2\.weight has a gradient"):
        train(model, optimizer, 0, 1)


def test_a_compiled_step_compiles_nothing_of_ours(device):
    import torch._dynamo.utils

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    optimizer = smartinf.AdamW(model.parameters(), devices=[device])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        step()
    assert optimizer._session.lineage.updates == 3
    # torch's own wrapper around step() is all; our code would make some twenty frames.
    assert torch._dynamo.utils.counters["frames"]["total"] < 12
