"""overlap: the update runs behind the next forward or beside backward, with the same bits, and nobody sees weights
that are not there yet. test_early_updates.py has what only early updates can run into."""

import copy
import gc
import io
import itertools
import pickle
import statistics

import pytest
import torch
import torch.utils.checkpoint  # noqa: F401

import smartinf
from smartinf import early_updates, options


WIDTH = 224  # 10 blocks of 65536 elements


torch.set_num_threads(1)  # so small a model gains nothing from more, and waits for them


class Model(torch.nn.Module):
    """Two modules share the embedding, one is never used, one holds a parameter of its own."""

    def __init__(self, dtype=torch.float32, checkpoint=None):
        super().__init__()
        self.embed = torch.nn.Embedding(61, WIDTH, dtype=dtype)
        torch.nn.init.normal_(self.embed.weight, std=0.05)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(12)))
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        self.unused = torch.nn.Linear(8, 8, dtype=dtype)
        self.head = torch.nn.Linear(WIDTH, 61, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.checkpoint = checkpoint  # None or use_reentrant

    def layer(self, i, h):
        return h + torch.nn.functional.gelu(self.body[i](h))

    def forward(self, x):
        h = self.embed(x) * self.scale
        for i in range(len(self.body)):
            if self.checkpoint is None:
                h = self.layer(i, h)
            else:
                h = torch.utils.checkpoint.checkpoint(self.layer, i, h, use_reentrant=self.checkpoint)
        return self.head(h)


def make(device, overlap=None, dtype=torch.float32, checkpoint=None, **options):
    """overlap: None, "late", "early" or "auto". Released gradients where they are needed, unless options say other."""
    torch.manual_seed(5)
    model = Model(dtype, checkpoint)
    if overlap is not None:
        options |= {"overlap": overlap, "model": model}
    if overlap == "early":
        options = {"release_gradients": True, "max_grad_norm": 0} | options
    options = {"lr": 1e-3, "devices": [device]} | options
    return model, smartinf.AdamW(model.named_parameters(), **options)


def tokens(step, batch=0):
    return torch.randint(61, (16,), generator=torch.Generator().manual_seed(100 * step + batch))


def loss_of(model, x):
    return torch.nn.functional.cross_entropy(model(x).float(), (7 * x + 3) % 61)


def train(model, optimizer, steps, passes=1):
    losses = []
    for step in steps:
        for i in range(passes):
            loss = loss_of(model, tokens(step, i)) / passes
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(folder, overlap, steps=range(7), passes=1, **options):
    """What may not differ by a bit: losses, norms, weights, and the state on the devices."""
    devices = [str(folder / f"{overlap}{i}") for i in range(options.pop("count", 1))]
    if passes > 1 and options.get("release_gradients"):
        options["accumulation_steps"] = passes
    model, optimizer = make(None, overlap, devices=devices, **options)
    losses, norms, overlaps, wrong = [], [], [], []
    for step in steps:
        losses += train(model, optimizer, [step], passes)
        norms.append(optimizer.grad_norm)
        overlaps.append(optimizer.overlap)
        wrong.append(optimizer.wrong_guess)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = []

    def keep(name, _, planes):
        state.append((name, {key: torch.as_tensor(plane).clone() for key, plane in planes.items()}))

    optimizer.visit_full_state(keep)
    optimizer.close()
    return (losses, norms, weights, state), overlaps, wrong


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1] == b[1]
    for name, value in a[2].items():
        assert torch.equal(value, b[2][name]), name
    for (name, planes), (_, others) in zip(a[3], b[3], strict=True):
        for key, plane in planes.items():
            assert torch.equal(plane, others[key]), (name, key)


RELEASED = {"release_gradients": True, "max_grad_norm": 0}
CASES = [
    ({"max_grad_norm": 0.1}, ["late"]),
    ({"compress": 0.3}, ["late", "auto"]),
    ({"where": "host", "gradient_budget": "64KiB"}, ["late"]),
    (RELEASED, ["late", "early", "auto"]),
    (RELEASED | {"max_grad_norm": 0.01}, ["early", "auto"]),  # every guess is wrong
    (RELEASED | {"count": 3, "subgroup_elements": 1 << 16, "max_grad_norm": "median"}, ["late", "early", "auto"]),
    (RELEASED | {"dtype": torch.bfloat16, "state_format": "bf16", "max_grad_norm": "median"}, ["late", "early"]),
    (RELEASED | {"state_format": "q8", "passes": 2, "max_grad_norm": "median"}, ["late", "early"]),
    (RELEASED | {"gradient_budget": "64KiB", "max_grad_norm": "median", "subgroup_elements": 1 << 16}, ["early"]),
    (RELEASED | {"checkpoint": True, "passes": 2}, ["late", "early"]),
    (RELEASED | {"checkpoint": False, "max_grad_norm": "median", "where": "host"}, ["late", "early"]),
]


@pytest.mark.parametrize(("options", "overlaps"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_same_bits_as_an_update_that_is_waited_for(options, overlaps, tmp_path):
    options = dict(options)
    median = options.get("max_grad_norm") == "median"
    if median:  # clips some of the steps
        first, _, _ = run(tmp_path / "first", None, **options | {"max_grad_norm": 0})
        options["max_grad_norm"] = statistics.median(first[1])
    expected, _, _ = run(tmp_path, None, **options)
    for overlap in overlaps:
        made, had, wrong = run(tmp_path, overlap, **options)
        assert_same(made, expected)
        if overlap != "auto":
            assert set(had) == {overlap}
        if overlap == "early":
            clipped = [0 < options["max_grad_norm"] < norm for norm in made[1]]
            assert wrong[1:] == clipped[1:]  # the first guess is that all parameters take part
            assert wrong[0]
            assert not median or 0 < sum(clipped[1:]) < len(clipped[1:])
        else:
            assert not any(wrong[:1])


def test_auto_may_choose_as_it_likes(tmp_path, monkeypatch):
    """Each step otherwise than the one before; half of the guesses are wrong."""
    options = {"release_gradients": True, "max_grad_norm": 0.0}
    expected, _, _ = run(tmp_path / "first", None, **options)
    options["max_grad_norm"] = statistics.median(expected[1])
    expected, _, _ = run(tmp_path, None, **options)
    choice = itertools.cycle([True, False, False])
    monkeypatch.setattr(early_updates._core, "early_update_pays", lambda *_: next(choice))
    made, had, _ = run(tmp_path, "auto", **options)
    assert_same(made, expected)
    assert had == ["early", "late", "late"] * 2 + ["early"]


def test_auto_begins_early_where_it_pays():
    pays = early_updates._core.early_update_pays
    assert pays(0.5, 1.0, 0.1, False)
    assert pays(0.0, 0.0, 0.1, False)  # nothing is clipped
    assert not pays(0.0, 1.0, 0.1, False)  # no step before
    assert not pays(0.9, 1.0, 0.1, False)
    assert not pays(0.5, 1.0, 0.01, False)  # a late update is not waited for
    assert pays(0.5, 1.0, 0.0, True)


def stepped(device, overlap="late", **options):
    """(model, optimizer, weights after the step), of which the model has none yet."""
    model, optimizer = make(device + "_plain", **options)
    train(model, optimizer, range(1))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    model, optimizer = make(device, overlap, **options)
    train(model, optimizer, range(1))
    assert optimizer._session.late.pending
    return model, optimizer, expected


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READERS = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "a module's state_dict": lambda model, optimizer: {
        "body." + name: value for name, value in model.body.state_dict().items()
    },
    "named_parameters": lambda model, optimizer: dict(model.named_parameters()),
    "parameters": lambda model, optimizer: dict(
        zip([name for name, _ in Model().named_parameters()], model.parameters(), strict=True)
    ),
    "parameters of a module around it": lambda model, optimizer: {
        name.removeprefix("0."): value for name, value in torch.nn.Sequential(model).named_parameters()
    },
    "wait_weights": lambda model, optimizer: optimizer.wait_weights() or dict(Model.named_parameters(model)),
    "synchronize": lambda model, optimizer: optimizer.synchronize() or dict(Model.named_parameters(model)),
    "close": lambda model, optimizer: optimizer.close() or dict(Model.named_parameters(model)),
    "moved": lambda model, optimizer: dict(Model.named_parameters(model.double().float())),
    "a copy": lambda model, optimizer: copy.deepcopy(model).state_dict(),
    "torch.save": lambda model, optimizer: saved_and_loaded(model).state_dict(),
    "a moving average": lambda model, optimizer: dict(
        torch.optim.swa_utils.AveragedModel(model).module.named_parameters()
    ),
}


@pytest.mark.parametrize("overlap", ["late", "early"])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_sees_finished_weights(device, reader, overlap):
    model, optimizer, expected = stepped(device, overlap)
    read = READERS[reader](model, optimizer)
    assert read
    for name, value in read.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("overlap", ["late", "early"])
def test_a_forward_without_gradients_waits_too(device, overlap):
    model, optimizer, expected = stepped(device, overlap)
    plain = Model()
    plain.load_state_dict(expected)
    with torch.inference_mode():
        assert torch.equal(model(tokens(9)), plain(tokens(9)))


def test_zero_grad_of_the_model_does_not_wait(device):
    model, optimizer, _ = stepped(device)
    model.zero_grad()
    assert optimizer._session.late.pending


@pytest.mark.parametrize(
    ("overlap", "release"), [(None, True), ("late", False), ("late", True), ("early", True)]
)
def test_weights_that_are_loaded_count(device, overlap, release):
    model, optimizer = make(device, overlap, release_gradients=release)
    train(model, optimizer, range(1))
    torch.manual_seed(9)
    loaded = Model().state_dict()
    model.load_state_dict(loaded)
    reference, other = make(device + "_reference")
    train(reference, other, range(1))
    other.synchronize()
    reference.load_state_dict(loaded)
    assert train(model, optimizer, range(1, 4)) == train(reference, other, range(1, 4))


@pytest.mark.parametrize(
    ("overlap", "checkpoint", "release"),
    [(None, None, False), (None, True, True), ("late", None, False), ("late", False, True), ("late", True, True)]
    + [("early", checkpoint, True) for checkpoint in (None, False, True)],
)
def test_a_second_backward_over_weights_that_were_updated_is_refused(device, overlap, checkpoint, release):
    """Without a model nobody but torch sees it, as with its own optimizers."""
    model, optimizer = make(device, overlap, checkpoint=checkpoint, release_gradients=release)
    loss = loss_of(model, tokens(0))
    loss.backward(retain_graph=True)
    optimizer.step()
    ours = pytest.raises(smartinf.UsageError, match=r"embed.weight has changed since this forward")
    torchs = pytest.raises(RuntimeError, match="modified by an inplace operation")
    for _ in range(2):
        with ours if overlap else torchs:
            loss.backward(retain_graph=True)
    optimizer.zero_grad()
    reference, other = make(device + "_reference")
    assert train(reference, other, range(3))[1:] == train(model, optimizer, range(1, 3))


def test_copies_and_closing_leave_a_plain_model(device):
    model, optimizer, expected = stepped(device)
    assert isinstance(model, Model) and type(model).__name__ == "Model"
    copied = copy.deepcopy(model)
    assert type(copied) is Model
    for name, value in copied.state_dict().items():
        assert torch.equal(value, expected[name])
    optimizer.close()
    assert type(model) is Model
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_step_that_is_dropped_leaves_the_weights(device):
    model, optimizer, expected = stepped(device, nonfinite="skip")
    (loss_of(model, tokens(1)) * float("nan")).backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_resumes_with_the_same_bits(device):
    model, optimizer = make(device, "late")
    losses = train(model, optimizer, range(4))
    optimizer.close()
    model, optimizer = make(device, "late", resume=True)
    losses += train(model, optimizer, range(4, 8))
    other, reference = make(device + "_whole")
    assert losses == train(other, reference, range(8))


def slow(device):
    """Of which new weights come so late that nobody has them by chance."""
    return {"path": device, "bandwidth": 3e7}


class Fused(Model):
    """Multiplies by weights of modules whose forward does not run, as losses that are fused with the head do."""

    def forward(self, x):
        h = torch.nn.functional.embedding(x, self.embed.weight) @ self.body[11].weight.t()
        for i in range(11):
            h = self.layer(i, h)
        return h @ self.head.weight.t()


class LeavesOut(Model):
    """Stochastic depth, or experts of which some are not chosen."""

    left_out = ()

    def layer(self, i, h):
        return h if i in self.left_out else super().layer(i, h)


class Outside(Model):
    """A weight that is read around autograd after its own backward."""

    def forward(self, x):
        h = torch.nn.functional.linear(self.embed(x) * self.scale, self.body[11].weight.detach())
        return self.head(self.body[11](h))


class Frozen(Model):
    """A layer that judges itself frozen, as a GAN's discriminator does, and is trained by another part of the loss."""

    def forward(self, x):
        weight = self.body[11].weight
        weight.requires_grad_(False)
        h = (self.embed(x).unsqueeze(1) * weight).sum(-1)  # the product saves the parameter itself
        weight.requires_grad_(True)
        return self.head(self.body[0](h) + self.body[11](h.detach()))


class Scripted(Model):
    """Layers that TorchScript computes, which asks nobody."""

    def __init__(self, *args):
        super().__init__(*args)
        self.body = torch.nn.ModuleList([torch.jit.script(self.body[:6]), *self.body[6:]])

    def forward(self, x):
        return self.head(self.body[0](self.embed(x)))


def share(model, step):
    """Weights that are copied to where the model has them."""
    if step == 1:
        model.share_memory()


def leave_out(model, step):
    """Layers that share subgroups with others, and whole subgroups."""
    model.left_out = [(), (1, 4, 7, 10), (0,), (), tuple(range(1, 12))][step % 5]


def freeze(model, step):
    for i, layer in enumerate(model.body):
        layer.requires_grad_(step % 2 == 0 or i in (step, step + 5))


def clamp(model, step):
    """A forward that writes its own weight, once the weight has come."""
    if step == 0:
        model.body[0].register_forward_pre_hook(lambda layer, _: [layer.weight.data.clamp_(-0.03, 0.03)] and None)


@pytest.mark.parametrize(
    ("model_class", "before", "overlaps"),
    [
        (Fused, None, ["late", "early", "auto"]),
        (LeavesOut, leave_out, ["late", "early", "auto"]),
        (Model, freeze, ["early", "auto"]),
        (Model, clamp, ["late", "early"]),
        (Outside, None, ["early"]),
        (Frozen, None, ["early"]),
        (Scripted, None, ["late", "early"]),
        (Fused, share, ["early"]),
    ],
    ids=["fused", "left out", "frozen", "clamped", "around autograd", "frozen in a part", "scripted", "moved"],
)
def test_whatever_forward_reads_and_writes(tmp_path, model_class, before, overlaps, monkeypatch):
    """Weights of modules that are not called, or not in this step, or written by themselves."""
    monkeypatch.setattr("test_overlap.Model", model_class)
    choice = itertools.cycle([True, True, False])
    monkeypatch.setattr(early_updates._core, "early_update_pays", lambda *_: next(choice))
    expected = None
    for overlap in (None, *overlaps):
        device = str(tmp_path / f"{overlap}")
        model, optimizer = make(None, overlap, devices=[slow(device) if overlap else device], **RELEASED)
        losses = []
        for step in range(6):
            if before is not None:
                before(model, step)
            losses += train(model, optimizer, [step])
        made = (losses, {name: value.detach().clone() for name, value in model.named_parameters()})
        optimizer.close()
        expected = expected or made
        assert made[0] == expected[0], overlap
        for name, value in expected[1].items():
            assert torch.equal(value, made[1][name]), (overlap, name)


def functional(model, h):
    return torch.func.functional_call(torch.nn.Linear(WIDTH, WIDTH), dict(model.body[11].named_parameters()), (h,))


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        return h @ weight.t()


@torch.jit.script
def scripted(h, weight):
    return h @ weight.t()


# Of the last layers, whose new weights are the last to come.
DIRECT_READERS = {
    "product": lambda model, h: h @ model.body[11].weight.t(),
    "embedding": lambda model, h: torch.nn.functional.embedding(tokens(0), model.body[11].weight),
    "detach": lambda model, h: model.body[11].weight.detach().clone(),
    "data": lambda model, h: model.body[11].bias.data.clone(),
    "numpy": lambda model, h: torch.from_numpy(model.body[11].weight.detach().numpy().copy()),
    "transposed": lambda model, h: model.body[11].weight.T.clone(),
    "in a list": lambda model, h: torch.stack([model.body[10].weight, model.body[11].weight]),
    "out": lambda model, h: torch.add(model.body[11].bias, 0, out=torch.empty(WIDTH)),
    "functional_call": functional,
    "autograd.Function": lambda model, h: Loss.apply(h, model.body[11].weight),
    "scripted": lambda model, h: scripted(h, model.body[11].weight),
    "torch.tensor": lambda model, h: torch.as_tensor(model.body[11].weight).clone(),
    "copy": lambda model, h: copy.deepcopy(model.body[11].weight),
    "pickle": lambda model, h: pickle.loads(pickle.dumps(model.body[11].weight)),
    "a layer's copy": lambda model, h: copy.deepcopy(model.body[11])(h),
    "vmap": lambda model, h: torch.func.vmap(lambda row: model.body[11].weight @ row)(h),
    "compiled": lambda model, h: torch.compile(lambda x: x @ model.body[11].weight.t(), backend="eager")(h),
    "held": lambda model, h: model.held.clone(),
    "held by numpy": lambda model, h: torch.from_numpy(model.held_by_numpy.copy()),
    "a list of before": lambda model, h: model.listed[0][-3].double(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", DIRECT_READERS)
def test_whoever_reads_a_weight_itself_waits_for_it(device, reader):
    def hold(model):
        model.held, model.held_by_numpy = model.body[10].weight.data, model.body[11].weight.detach().numpy()
        model.listed = [list(model.parameters())]

    h = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    read = []
    for overlap, place in ((None, device + "_plain"), ("late", slow(device))):
        model, optimizer = make(None, overlap, devices=[place])
        hold(model)
        train(model, optimizer, range(1))
        with torch.no_grad():
            read.append(DIRECT_READERS[reader](model, h))
    assert torch.equal(*read)


def test_metadata_does_not_wait(device):
    model, optimizer, _ = stepped(device)
    layout = optimizer._session.layout
    weight = layout.params[layout.names.index("body.3.weight")]
    assert weight.shape == (WIDTH, WIDTH) and weight.dtype == torch.float32 and weight.numel() and weight.grad is None
    assert isinstance(weight, torch.nn.Parameter) and type(weight).__name__ == "Parameter"
    assert optimizer._session.late.pending == set(range(len(layout.params)))
    weight.sum()
    assert len(optimizer._session.late.pending) == len(layout.params) - 1
    optimizer.wait_weights()
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())


def test_a_deleted_optimizer_is_named(device):
    model, optimizer, _ = stepped(device)
    del optimizer
    gc.collect()
    with pytest.raises(smartinf.UsageError, match="optimizer was deleted"):
        model(tokens(0))


def test_several_ranks_are_refused(device, monkeypatch):
    class Ranks(options.Ranks):
        def __init__(self, _):
            self.rank, self.world = 0, 2

    monkeypatch.setattr(options, "Ranks", Ranks)
    model = Model()
    with pytest.raises(smartinf.UsageError, match="overlap works in one process"):
        smartinf.AdamW(model.parameters(), devices=[device], overlap=model)


def test_what_cannot_be_overlapped_is_named(device):
    model = Model()

    def refused(match, **options):
        with pytest.raises(smartinf.UsageError, match=match):
            smartinf.AdamW(model.named_parameters(), devices=[device], **options)

    refused('overlap=True: known are "none", "late"', overlap=True)
    refused("overlap='soon': known are", overlap="soon", model=model)
    refused('overlap="late" needs the model', overlap="late")
    refused("model= is for overlap", model=model)
    refused("parameter scale is in no module", overlap=model.body)
    refused('overlap="early" needs release_gradients=True', overlap="early", model=model)
    early = {"overlap": "early", "model": model, "release_gradients": True}
    refused("needs whole gradients, and these are compressed", compress=0.3, **early | {"resume": False})
