"""State in and out: resume, state dicts both ways, checkpoints, what is refused."""

import copy
import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

import smartinf
from smartinf import checkpoint, relayout, session, torch_state


def build(dtype=torch.float32):
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 5)).to(dtype)


def train(model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 20, generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resume_goes_on_bit_for_bit(dtype, device, tmp_path):
    model = build(dtype)
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 4)
    optimizer.close()
    again = build(dtype)
    optimizer = smartinf.AdamW(again.parameters(), lr=1e-2, devices=[device], resume=True)
    train(again, optimizer, 4, 8)

    whole = build(dtype)
    optimizer = smartinf.AdamW(whole.parameters(), lr=1e-2, devices=[str(tmp_path / "other")])
    train(whole, optimizer, 0, 8)
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(whole), strict=True))


def test_devices_with_state_need_a_decision(device):
    model = build()
    with pytest.raises(smartinf.DeviceError, match=r"locked|in use|busy|open"):
        first = smartinf.AdamW(model.parameters(), devices=[device])
        smartinf.AdamW(model.parameters(), devices=[device])
    train(model, first, 0, 1)
    first.close()
    second = smartinf.AdamW(model.parameters(), devices=[device])
    with pytest.raises(smartinf.UsageError, match="resume=True"):
        train(model, second, 1, 2)
    second.close()
    third = smartinf.AdamW(build().parameters(), devices=[device], resume=False)
    assert third._session.lineage.updates == 0
    third.close()
    with pytest.raises(smartinf.MismatchError, match="device"):
        smartinf.AdamW(torch.nn.Linear(3, 3).parameters(), devices=[device])


@pytest.mark.parametrize("durability", ["step", "none"])
def test_state_in_memory_changes_no_bit(durability, tmp_path):
    def run(cache):
        torch.manual_seed(5)
        model = torch.nn.Linear(640, 512, bias=False)  # five subgroups
        moved = []
        for first in (0, 2):
            optimizer = smartinf.AdamW(
                model.parameters(),
                lr=1e-2,
                devices=[tmp_path / f"cache-{cache}"],
                resume=first > 0,
                subgroup_elements=65536,
                durability=durability,
                state_cache=cache,
            )
            for step in range(first, first + 2):
                generator = torch.Generator().manual_seed(step)
                before = optimizer.traffic()
                model(torch.randn(3, 640, generator=generator)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.synchronize()
                now = optimizer.traffic()
                moved.append([now[way]["state"] - before[way]["state"] for way in ("read", "cached")])
            assert ("2 of them in memory too" in optimizer.describe_devices()[0]) == bool(cache)
            state = optimizer.full_state_dict()["state"][0]
            optimizer.save_checkpoint(tmp_path / f"checkpoint-{cache}-{first}")
            optimizer.close()
        return [model.weight.detach().clone(), state["exp_avg"], state["exp_avg_sq"]], moved

    plain, moved_plain = run(None)
    cached, moved = run("2MB")
    for a, b in zip(plain, cached, strict=True):
        assert torch.equal(a, b)
    # Filled by the first step after opening; two subgroups are in memory from then on.
    assert [held for _, held in moved] == [0, 2 * 12 * 65536, 0, 2 * 12 * 65536]
    assert [read + held for read, held in moved] == [read for read, _ in moved_plain]
    with pytest.raises(smartinf.UsageError, match="state_cache"):
        smartinf.AdamW([plain[0].requires_grad_()], devices=[tmp_path / "x"], state_cache="much")


def test_small_state_dict_refers_to_the_devices(device, tmp_path):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    saved, saved_model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert not any(isinstance(value, torch.Tensor) for value in saved["state"].get(0, {}).values())
    torch.save(saved, tmp_path / "optimizer.pt")
    optimizer.close()

    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=5.0, devices=[device])
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, 3, 5)
    expected = weights(model)
    # The devices have moved on: the dict now refers to nothing that is there.
    optimizer.load_state_dict(saved)
    with pytest.raises(smartinf.MismatchError, match="update 3"):
        train(model, optimizer, 5, 6)
    optimizer.close()
    whole = build()
    train(whole, smartinf.AdamW(whole.parameters(), lr=1e-2, devices=[str(tmp_path / "w")]), 0, 5)
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(whole), strict=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lr": 1e-2}),
        ("SGD", {"lr": 1e-2, "momentum": 0.9}),
        ("Adagrad", {"lr": 1e-2}),
    ],
)
def test_full_state_dict_goes_both_ways(name, options, device):
    """torch -> ours -> torch: the losses are those of torch alone."""
    straight = build()
    reference = getattr(torch.optim, name)(straight.parameters(), **options)
    expected = train(straight, reference, 0, 9)

    model = build()
    theirs = getattr(torch.optim, name)(model.parameters(), **options)
    losses = train(model, theirs, 0, 3)
    ours = getattr(smartinf, name)(model.parameters(), **options, devices=[device])
    ours.load_state_dict(theirs.state_dict())
    losses += train(model, ours, 3, 6)
    back = getattr(torch.optim, name)(model.parameters(), **options)
    back.load_state_dict(ours.full_state_dict())
    losses += train(model, back, 6, 9)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("step", [-1, float("nan"), 1e300])
def test_a_number_of_steps_that_cannot_be_is_refused(step, device):
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 2)
    full = optimizer.full_state_dict()
    full["state"][1]["step"] = torch.tensor(step)
    with pytest.raises(smartinf.MismatchError, match=r"step of 0.bias is"):
        optimizer.load_state_dict(full)
    train(model, optimizer, 2, 3)


def test_streamed_state_is_the_full_one(device):
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), devices=[device], subgroup_elements=1)
    train(model, optimizer, 0, 2)
    full = optimizer.full_state_dict()["state"]
    seen = []

    def visit(name, param, entry):
        number = len(seen)
        seen.append(name)
        assert entry["step"] == 2
        assert torch.equal(entry["master"], param.detach())
        assert torch.equal(entry["exp_avg_sq"], full[number]["exp_avg_sq"])

    optimizer.visit_full_state(visit)
    assert seen == [name for name, _ in model.named_parameters()]


def test_checkpoint_can_be_moved_and_continued(device, tmp_path):
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    optimizer.save_checkpoint(tmp_path / "saved")
    at_three = weights(model)
    expected = train(model, optimizer, 3, 6)
    optimizer.load_checkpoint(tmp_path / "saved")  # back in time, in place
    assert all(torch.equal(a, b) for a, b in zip(weights(model), at_three, strict=True))
    assert train(model, optimizer, 3, 6) == expected
    optimizer.close()

    shutil.move(tmp_path / "saved", tmp_path / "moved")
    other = build()
    optimizer = smartinf.AdamW(other.named_parameters(), lr=1e-2, devices=[str(tmp_path / "else")])
    optimizer.load_checkpoint(tmp_path / "moved")
    assert train(other, optimizer, 3, 6) == expected

    with pytest.raises(smartinf.DeviceError, match="replace=True"):
        optimizer.save_checkpoint(tmp_path / "moved")
    train(other, optimizer, 6, 7)
    optimizer.save_checkpoint(tmp_path / "moved", replace=True)
    at_seven = weights(other)
    train(other, optimizer, 7, 8)
    optimizer.load_checkpoint(tmp_path / "moved")
    assert all(torch.equal(a, b) for a, b in zip(weights(other), at_seven, strict=True))
    (tmp_path / "moved" / "checkpoint.json").unlink()
    with pytest.raises(smartinf.DeviceError, match="no complete optimizer checkpoint"):
        optimizer.load_checkpoint(tmp_path / "moved")
    # What is in the folder besides is nobody's to delete.
    (tmp_path / "moved" / "notes").write_text("mine")
    with pytest.raises(smartinf.DeviceError, match="moved/notes"):
        optimizer.save_checkpoint(tmp_path / "moved", replace=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["device", "else", "moved"]


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_flipped_bit_in_a_checkpoint_is_never_loaded(durability, device, tmp_path):
    model = build()
    optimizer = smartinf.AdamW(
        model.named_parameters(), lr=1e-2, devices=[device], durability=durability
    )
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "saved")
    train(model, optimizer, 2, 3)
    before, full = weights(model), copy.deepcopy(optimizer.full_state_dict())
    file = tmp_path / "saved" / "device-0" / "smartinf.state"
    whole = file.read_bytes()
    # The last plane's end, so that all that comes before it has been taken over when it is met.
    last = torch.empty(full["state"][3]["exp_avg_sq"].shape)
    checkpoint.Stored(tmp_path / "saved").read(2, 3, 0, last.numel(), last)
    place = whole.index(last.numpy().tobytes())
    for at in (place, place + 4 * last.numel() - 1):
        for bit in (1, 0x40):
            damaged = bytearray(whole)
            damaged[at] ^= bit
            file.write_bytes(damaged)
            with pytest.raises(smartinf.CorruptError, match="variance plane"):
                optimizer.load_checkpoint(tmp_path / "saved")
            assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
            here = optimizer.full_state_dict()["state"]
            for number, entry in full["state"].items():
                assert torch.equal(entry["exp_avg_sq"], here[number]["exp_avg_sq"])
    train(model, optimizer, 3, 4)  # and it is not in the way of training on
    file.write_bytes(whole)
    optimizer.load_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize(
    "changed",
    [
        lambda said: [said],
        lambda said: said | {"parameters": 7},
        lambda said: said | {"parameters": [["0.weight"]]},
        lambda said: said | {"parameters": [[["0.weight"], [1]]]},
        lambda said: said | {"parameters": [["0.weight", [None]]]},
        lambda said: said | {"parameters": said["parameters"][1:]},
        lambda said: said | {"param_groups": [{"params": ["x"]}]},
        lambda said: said | {"param_groups": {"lr": 1}},
    ],
)
def test_a_description_that_cannot_be_is_refused(changed, device, tmp_path):
    """By another than the optimizer: the first versions wrote no checksum, so none is needed."""
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "saved")
    before, file = weights(model), tmp_path / "saved" / "checkpoint.json"
    whole = json.loads(file.read_text())
    del whole["checksum"]
    file.write_text(json.dumps(whole | {"trainer": json.dumps(changed(json.loads(whole["trainer"])))}))
    with pytest.raises(smartinf.CorruptError, match="saved"):
        optimizer.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_a_checkpoint_of_the_first_form_is_explained(device, tmp_path):
    optimizer = smartinf.AdamW(build().named_parameters(), devices=[device])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "index.json").write_text('{"format": 1}')
    with pytest.raises(smartinf.MismatchError, match="full_state_dict"):
        optimizer.load_checkpoint(tmp_path / "old")
    optimizer.save_checkpoint(tmp_path / "old", replace=True)
    assert not (tmp_path / "old" / "index.json").exists()
    optimizer.load_checkpoint(tmp_path / "old")


def command(*words, code=0):
    binary = os.path.join(os.environ["SMARTINF_BINARY_DIR"], "bin", "smartinf")
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif("SMARTINF_BINARY_DIR" not in os.environ, reason="the command is not built here")
def test_the_command_and_python_take_each_others_checkpoints(device, tmp_path):
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    optimizer.save_checkpoint(tmp_path / "ours")
    expected = train(model, optimizer, 3, 6)
    optimizer.close()
    assert "sound" in command("fsck", tmp_path / "ours")
    assert "step 3" in command("restore", tmp_path / "ours", "--device", tmp_path / "back")
    again = build()
    optimizer = smartinf.AdamW(
        again.named_parameters(), lr=1e-2, devices=[str(tmp_path / "back")], resume=True
    )
    optimizer.synchronize()
    command("checkpoint", tmp_path / "back", "--out", tmp_path / "kept", code=1)  # it is in use
    optimizer.close()
    command("checkpoint", tmp_path / "back", "--out", tmp_path / "kept")
    third = build()
    optimizer = smartinf.AdamW(third.named_parameters(), lr=1e-2, devices=[str(tmp_path / "third")])
    optimizer.load_checkpoint(tmp_path / "kept" / "step-00000003")
    assert train(third, optimizer, 3, 6) == expected
    with pytest.raises(smartinf.UsageError, match="part of a checkpoint"):
        smartinf.AdamW(build().named_parameters(), devices=[str(tmp_path / "ours" / "device-0")])


@pytest.mark.skipif("SMARTINF_BINARY_DIR" not in os.environ, reason="the command is not built here")
@pytest.mark.parametrize(("state_format", "master"), [("f32", "f32"), ("q4", "m24")])
def test_the_command_and_python_clip_to_the_same_bits(state_format, master, tmp_path):
    """The command's first gradient, which a run without beta1 keeps as its momentum, makes the same step here."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{n} squared is {n * n}, " for n in range(400)))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    beside = ["--model.layers", 1, "--model.width", 64, "--model.heads", 2, "--data.paths", corpus, "--data.sequence", 32]
    beside += ["--train.steps", 1, "--train.warmup_steps", 0, "--train.lr_floor", 1, "--train.precision", "f32"]
    beside += ["--train.accumulation", 1, "--train.micro_batch", 4, "--train.threads", 1, "--train.sample_tokens", 0]
    beside += ["--train.weight_decay", 0, "--train.validate_every", 0, "--optimizer.beta1", 0, "--optimizer.beta2", 0.999]

    def planes(name, lr, clip, *more):
        run = tmp_path / name
        command("train", recipe, *beside, *more, "--train.lr", lr, "--train.clip_norm", clip, "--optimizer.eps", 1e-8, "--train.run", run)
        command("checkpoint", run, "--out", run / "copies")
        stored = checkpoint.Stored(next((run / "copies").glob("step-*")))
        made = {}
        for number, (name, shape) in enumerate(stored.parameters):
            made[name] = [torch.empty(shape) for _ in range(3)]
            for plane, out in enumerate(made[name]):
                stored.read(plane, number, 0, out.numel(), out)
        return made

    master_flags = ["--optimizer.master", master]
    before = planes("free", 1e-30, 0, *master_flags)  # such a step moves no weight
    expected = planes("clipped", 1e-2, 0.3, *master_flags, "--optimizer.format", state_format)
    params = {name: torch.nn.Parameter(weight.clone()) for name, (weight, _, _) in before.items()}
    optimizer = smartinf.AdamW(
        list(params.items()), lr=1e-2, betas=(0, 0.999), eps=1e-8, weight_decay=0, max_grad_norm=0.3,
        devices=[str(tmp_path / "device")], state_format=state_format, master=master,
    )  # fmt: skip
    for name, (_, gradient, _) in before.items():
        params[name].grad = gradient
    optimizer.step()
    assert optimizer.grad_norm > 0.6
    seen = {}
    optimizer.visit_full_state(lambda name, _, planes: seen.update({name: planes}))
    assert seen.keys() == expected.keys()
    for name, wanted in expected.items():
        here = [seen[name][key] for key in ("master", "exp_avg", "exp_avg_sq")]
        assert all(torch.equal(a, b) for a, b in zip(here, wanted, strict=True)), name


def test_the_norm_is_clipped_as_torch_clips_it(device):
    """Also where the norm is the limit itself."""
    for limit in (4.0, 5.0, 5.0000005, 5.1):
        ours, theirs = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        for param in (ours, theirs):
            param.grad = torch.tensor([3.0, 4.0])
        with smartinf.SGD([ours], lr=1.0, max_grad_norm=limit, devices=[f"{device}{limit}"]) as optimizer:
            optimizer.step()
        torch.nn.utils.clip_grad_norm_([theirs], limit)
        torch.optim.SGD([theirs], lr=1.0).step()
        torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=0)


def test_a_script_may_change_its_folder(tmp_path, monkeypatch):
    """Another model's state under the same relative path, where it goes, is neither saved nor overwritten."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "b")
    other = build()
    with smartinf.AdamW(other.named_parameters(), lr=1e-1, devices=["dev"]) as optimizer:
        train(other, optimizer, 0, 2)
    monkeypatch.chdir(tmp_path / "a")
    model, late = build(), torch.nn.Parameter(torch.ones(9))
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=["dev"])
    context = smartinf.offload_activations(model, devices=["act"], keep=0)
    train(model, optimizer, 0, 2)
    monkeypatch.chdir(tmp_path / "b")
    with context:
        train(model, optimizer, 2, 3)
    optimizer.save_checkpoint("saved")  # in the folder of the moment
    optimizer.add_param_group({"params": [("late", late)]})
    optimizer.close()
    fresh = build()
    with smartinf.AdamW(fresh.named_parameters(), devices=[str(tmp_path / "c")]) as optimizer:
        optimizer.load_checkpoint("saved")
    assert all(torch.equal(a, b) for a, b in zip(weights(fresh), weights(model), strict=True))
    with smartinf.AdamW(build().named_parameters(), devices=["dev"], resume=True) as optimizer:
        assert optimizer._session.lineage.updates == 2
        assert all(torch.equal(a, b) for a, b in zip(optimizer.param_groups[0]["params"], weights(other), strict=True))
    assert sorted(os.listdir(tmp_path / "b")) == ["dev", "saved"]


def test_a_folder_that_is_exchanged_under_a_run_is_not_taken_for_its_own(tmp_path):
    here, moved = str(tmp_path / "here"), str(tmp_path / "moved")
    other = build()
    with smartinf.AdamW(other.named_parameters(), lr=1e-1, devices=[here]) as optimizer:
        train(other, optimizer, 0, 2)
    shutil.copytree(here, tmp_path / "other")
    shutil.rmtree(here)
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[here])
    train(model, optimizer, 0, 2)
    os.rename(here, moved)
    os.rename(tmp_path / "other", here)
    for call in (
        lambda: optimizer.save_checkpoint(tmp_path / "saved"),
        lambda: optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(9)))]}),
    ):
        with pytest.raises(smartinf.DeviceError, match="another state is in its place now"):
            call()
    train(model, optimizer, 2, 3)
    optimizer.close()
    for folder, expected in ((here, other), (moved, model)):
        with smartinf.AdamW(build().named_parameters(), devices=[folder], resume=True) as optimizer:
            assert all(torch.equal(a, b) for a, b in zip(optimizer.param_groups[0]["params"], weights(expected), strict=True))


def test_a_home_folder_is_written_out_and_variables_are_refused(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    model = build()
    optimizer = smartinf.AdamW(model.named_parameters(), devices="~/device,lr=0.1")
    train(model, optimizer, 0, 1)
    optimizer.save_checkpoint("~/saved")
    optimizer.load_checkpoint("~/saved")
    torch_state.write("~/saved", "~/optimizer.pt")
    for path in ("$HOME/device", "~nobody-of-this-name/device"):
        for refused in (lambda p=path: smartinf.AdamW(model.parameters(), devices=p), lambda p=path: optimizer.save_checkpoint(p)):
            with pytest.raises(smartinf.UsageError, match="only|no such home"):
                refused()
    assert os.listdir() == []
    assert sorted(os.listdir(tmp_path / "home")) == ["device,lr=0.1", "optimizer.pt", "saved"]


def test_parameters_that_came_later_are_added_first_and_loaded_then(device, tmp_path):
    def started(folder):
        model = build()
        head = list(model[2].named_parameters(prefix="head"))
        return model, smartinf.AdamW([{"params": head}], lr=1e-2, devices=[folder])

    def thaw(model, optimizer):
        optimizer.add_param_group({"params": list(model[0].named_parameters(prefix="back"))})

    model, optimizer = started(device)
    train(model, optimizer, 0, 2)
    optimizer.save_checkpoint(tmp_path / "early")
    model.zero_grad()
    thaw(model, optimizer)
    train(model, optimizer, 2, 4)
    optimizer.save_checkpoint(tmp_path / "saved")
    small = optimizer.state_dict()

    again, optimizer = started(str(tmp_path / "again"))
    with pytest.raises(smartinf.MismatchError, match=r"state of back.bias.* call add_param_group\(\) first"):
        optimizer.load_checkpoint(tmp_path / "saved")
    with pytest.raises(smartinf.UsageError, match=r"groups of \[2, 2\] parameters.*\[2\]. Call add_param_group"):
        optimizer.load_state_dict(small)
    thaw(again, optimizer)
    with pytest.raises(smartinf.MismatchError, match=r"no state of parameter back.* saved before add_param_group"):
        optimizer.load_checkpoint(tmp_path / "early")
    optimizer.load_state_dict(small)
    optimizer.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(model), strict=True))


def test_the_order_of_parameters_is_that_of_the_devices(device):
    """A script that orders or groups them otherwise goes on with the state."""
    model = build()
    with smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device]) as optimizer:
        train(model, optimizer, 0, 2)
    whole = copy.deepcopy(model)
    again = build()
    named = list(again.named_parameters())
    groups = [{"params": named[::-2]}, {"params": named[-2::-2]}]
    optimizer = smartinf.AdamW(groups, lr=1e-2, devices=[device], resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(whole), strict=True))
    train(again, optimizer, 2, 4)
    optimizer.close()
    with smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device], resume=True) as optimizer:
        assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(model), strict=True))
    with pytest.raises(smartinf.MismatchError, match="different model") as raised:
        smartinf.AdamW([("0.weight", named[0][1])], devices=[device], resume=True)
    assert "delete" not in str(raised.value)


@pytest.mark.parametrize("killed_at", ["save", "erase", "open", "load", "forget"])
def test_a_crash_in_add_param_group_loses_nothing(killed_at, device, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_, **__):
        raise Killed

    model, late = build(), torch.nn.Parameter(torch.ones(9))
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 3)
    optimizer.save_checkpoint(tmp_path / "saved")
    kept = checkpoint.identity(tmp_path / "saved")
    with monkeypatch.context() as patched:
        if killed_at == "save":
            patched.setattr(optimizer, "close", die)
        elif killed_at == "erase":
            erase = smartinf._core.erase
            patched.setattr(smartinf._core, "erase", lambda *given: (erase(*given), die()))
        elif killed_at == "open":
            patched.setattr(checkpoint, "load", die)
        elif killed_at == "load":
            patched.setattr(session.Session, "load_weights", die)
        else:
            patched.setattr(relayout, "discard", die)
        with pytest.raises(Killed):
            optimizer.add_param_group({"params": [("late", late)]})
    if optimizer._session.core is not None:
        optimizer._session.core.close()
        optimizer._session.core = None

    left = pathlib.Path(f"{device}-add_param_group.checkpoint")
    assert left.is_dir()
    parameters = list(build().named_parameters())
    if killed_at in ("load", "forget"):  # the state is on the devices, laid out anew
        parameters.append(("late", late))
    if killed_at in ("erase", "open"):
        for resume in (True, None):
            with pytest.raises(smartinf.MismatchError, match="add_param_group was interrupted"):
                smartinf.AdamW(parameters, lr=1e-2, devices=[device], resume=resume)
        optimizer = smartinf.AdamW(parameters, lr=1e-2, devices=[device], resume=False)
        optimizer.load_checkpoint(left)
    else:
        optimizer = smartinf.AdamW(parameters, lr=1e-2, devices=[device], resume=True)
    assert optimizer._session.lineage.identity() == kept
    assert not left.exists()


def test_weights_written_from_outside_are_taken_over(device):
    model = build()
    optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[device])
    train(model, optimizer, 0, 2)
    changed = build()
    with torch.no_grad():
        for p in changed.parameters():
            p.mul_(2)
    model.load_state_dict(changed.state_dict())
    state = optimizer.full_state_dict()
    train(model, optimizer, 2, 4)

    reference = torch.optim.AdamW(changed.parameters(), lr=1e-2)
    reference.load_state_dict(state)
    train(changed, reference, 2, 4)
    for a, b in zip(weights(model), weights(changed), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_rounded_weights_keep_their_masters(device, tmp_path):
    """A bf16 model whose weights are loaded again, unchanged, must not lose the master's precision."""
    runs = []
    for reload in (False, True):
        model = build(torch.bfloat16)
        optimizer = smartinf.AdamW(model.parameters(), lr=1e-3, devices=[f"{device}{reload}"])
        train(model, optimizer, 0, 3)
        if reload:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        train(model, optimizer, 3, 6)
        runs.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_many_step_counts_fit_the_devices_record():
    from smartinf.lineage import Lineage

    lineage = Lineage(20_000)
    lineage.steps = [i * 7919 % 1000 for i in range(20_000)]
    text = lineage.to_json()
    assert len(text) < 64 * 1024
    assert Lineage.from_json(text, 20_000, "here").steps == lineage.steps
    with pytest.raises(smartinf.CorruptError, match="not 19999"):
        Lineage.from_json(text, 19_999, "here")
