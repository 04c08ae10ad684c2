"""Two models of one optimizer: groups with rates and rhythms of their own, which one commit makes durable together."""

import pathlib

import pytest
import torch
from nightly import nightly
from torch import nn

import smartinf
from smartinf.storage_optimizer import session_of

torch.set_num_threads(1)


def pair():
    """Their layers have the same names."""
    torch.manual_seed(3)
    return nn.ModuleDict({
        "student": nn.Sequential(nn.Linear(24, 300), nn.Tanh(), nn.Linear(300, 6)),
        "peer": nn.Sequential(nn.Linear(24, 260), nn.Tanh(), nn.Linear(260, 6)),
    })  # fmt: skip


def groups(models):
    return [
        {"params": list(models["student"].named_parameters(prefix="student")), "lr": 1e-2, "weight_decay": 0.1},
        {"params": list(models["peer"].named_parameters(prefix="peer")), "lr": 3e-3, "betas": (0.5, 0.99)},
    ]  # fmt: skip


def losses(models, step):
    """Each learns the batch, and the other's opinion of it. The peer rests in two of three steps."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 24, generator=generator), torch.randint(0, 6, (16,), generator=generator)
    student, peer = models["student"](x), models["peer"](x)

    def loss(own, other):
        opinion = nn.functional.kl_div(own.log_softmax(-1), other.detach().softmax(-1), reduction="batchmean")
        return nn.functional.cross_entropy(own, y) + opinion

    return loss(student, peer), loss(peer, student) if step % 3 == 0 else None


def train(models, optimizers, steps):
    found = []
    for step in steps:
        both = losses(models, step)
        for loss in both:
            if loss is not None:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(both[0].item())
    return found


def test_each_has_the_bits_of_an_optimizer_of_its_own(tmp_path):
    apart = pair()
    own = [smartinf.AdamW([group], devices=[tmp_path / str(i)]) for i, group in enumerate(groups(apart))]
    expected = []
    for step in range(20):
        student, peer = losses(apart, step)
        expected.append(student.item())
        for loss, optimizer in zip((student, peer), own, strict=True):
            if loss is not None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    together = pair()
    optimizer = smartinf.AdamW(groups(together), devices=[tmp_path / "both"])
    assert train(together, [optimizer], range(20)) == expected
    for mine, theirs in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    by_torch = pair()
    assert expected == pytest.approx(train(by_torch, [torch.optim.AdamW(groups(by_torch))], range(20)), rel=1e-4)


def test_a_group_that_rests_is_neither_read_nor_written(tmp_path):
    models = nn.ModuleDict({"student": nn.Linear(256, 512, bias=False), "peer": nn.Linear(256, 1024, bias=False)})
    optimizer = smartinf.AdamW(models.named_parameters(), devices=[tmp_path / "device"], subgroup_elements=65536)

    def state_bytes():
        optimizer.synchronize()  # a commit goes on after step()
        traffic = session_of(optimizer).core.traffic()
        return traffic["read"]["state"] + traffic["written"]["state"]

    def moved(*which):
        before = state_bytes()
        sum(models[name].weight.square().sum() for name in which).backward()
        optimizer.step()
        optimizer.zero_grad()
        return state_bytes() - before

    moved("student", "peer")
    student, peer, both = moved("student"), moved("peer"), moved("student", "peer")
    assert student == 2 * 12 * 256 * 512  # read and written
    assert peer == 2 * student
    assert both == 3 * student


def test_one_of_them_is_taken_out(tmp_path):
    models = pair()
    optimizer = smartinf.AdamW(groups(models), devices=[tmp_path / "both"])
    train(models, [optimizer], range(4))
    alone = {}

    def visit(name, _, state):
        if name.startswith("student."):
            alone[name.removeprefix("student.")] = state["master"]

    optimizer.visit_full_state(visit)
    other = pair()["student"]
    other.load_state_dict(alone)
    for found, expected in zip(other.parameters(), models["student"].parameters(), strict=True):
        assert torch.equal(found, expected)


TRAIN = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import smartinf, test_two_models

    models = test_two_models.pair()
    optimizer = smartinf.AdamW(test_two_models.groups(models), devices=sys.argv[2:], resume=True)
    for step in range(optimizer.updates, {steps}):
        print(step, *test_two_models.train(models, [optimizer], [step]), flush=True)
    optimizer.close()
"""


@pytest.mark.parametrize("kills", [5, nightly(200)])
def test_kills_leave_both_at_one_step(tmp_path, processes, kills):
    """The student's loss needs the peer as it was in the same step, and the other way round."""
    steps = 12 * kills
    models = pair()
    optimizer = smartinf.AdamW(groups(models), devices=[tmp_path / "a", tmp_path / "b"])
    expected = train(models, [optimizer], range(steps))
    folders = [str(tmp_path / "c"), str(tmp_path / "d")]
    found = processes.train_and_kill(kills, TRAIN.format(steps=steps), str(pathlib.Path(__file__).parent), *folders)
    assert len(found) > 0.8 * steps and all(seen == {expected[step]} for step, seen in found.items())
    again = pair()
    smartinf.AdamW(groups(again), devices=folders, resume=True)
    for mine, theirs in zip(again.parameters(), models.parameters(), strict=True):
        assert torch.equal(mine, theirs)
