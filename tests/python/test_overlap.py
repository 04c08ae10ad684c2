"""overlap=model: the update runs behind the next forward, and nobody sees weights that are not there yet."""

import copy

import pytest
import torch

import smartinf


class Model(torch.nn.Module):
    """Two modules share the embedding, one is never used, one holds a parameter of its own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(61, 96, dtype=dtype)
        self.body = torch.nn.Sequential(*(torch.nn.Linear(96, 96, dtype=dtype) for _ in range(12)))
        self.scale = torch.nn.Parameter(torch.ones(96, dtype=dtype))
        self.unused = torch.nn.Linear(8, 8, dtype=dtype)
        self.head = torch.nn.Linear(96, 61, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) * self.scale
        for layer in self.body:
            h = h + torch.nn.functional.gelu(layer(h))
        return self.head(h)


def make(device, late, dtype=torch.float32, **options):
    torch.manual_seed(5)
    model = Model(dtype)
    overlap = {"overlap": model} if late else {}
    return model, smartinf.AdamW(
        model.named_parameters(), lr=1e-2, devices=[device], **overlap, **options
    )


def tokens(step, batch=0):
    return torch.randint(61, (16,), generator=torch.Generator().manual_seed(100 * step + batch))


def loss_of(model, x):
    return torch.nn.functional.cross_entropy(model(x).float(), x)


def train(model, optimizer, steps, passes=1):
    losses = []
    for step in steps:
        for i in range(passes):
            loss = loss_of(model, tokens(step, i))
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1},
        {"dtype": torch.bfloat16, "release_gradients": True, "max_grad_norm": 1.0},
        {"state_format": "q8", "release_gradients": True, "accumulation_steps": 2, "max_grad_norm": 1.0},
        {"compress": 0.3},
        {"where": "host", "gradient_budget": "64KiB"},
    ],
    ids=str,
)
def test_same_bits_as_an_update_that_is_waited_for(tmp_path, options):
    passes = options.get("accumulation_steps", 1)
    seen = []
    for late in (False, True):
        model, optimizer = make(str(tmp_path / str(late)), late, **options)
        seen.append((train(model, optimizer, range(8), passes), model.state_dict(), optimizer))
    assert seen[0][0] == seen[1][0]
    for name, value in seen[0][1].items():
        assert torch.equal(value, seen[1][1][name]), name
    assert seen[1][2].exposed_s > 0


def stepped(device, **options):
    """(model, optimizer, weights after the step), of which the model has none yet."""
    model, optimizer = make(device + "_plain", False, **options)
    train(model, optimizer, range(1))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = make(device, True, **options)
    train(model, optimizer, range(1))
    assert optimizer._session.late.pending
    return model, optimizer, expected


READERS = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "a module's state_dict": lambda model, optimizer: {
        "body." + name: value for name, value in model.body.state_dict().items()
    },
    "named_parameters": lambda model, optimizer: dict(model.named_parameters()),
    "parameters": lambda model, optimizer: dict(
        zip([name for name, _ in Model().named_parameters()], model.parameters(), strict=True)
    ),
    "wait_weights": lambda model, optimizer: optimizer.wait_weights() or dict(Model.named_parameters(model)),
    "synchronize": lambda model, optimizer: optimizer.synchronize() or dict(Model.named_parameters(model)),
    "close": lambda model, optimizer: optimizer.close() or dict(Model.named_parameters(model)),
    "a moving average": lambda model, optimizer: dict(
        torch.optim.swa_utils.AveragedModel(model).module.named_parameters()
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_sees_finished_weights(device, reader):
    model, optimizer, expected = stepped(device)
    read = READERS[reader](model, optimizer)
    assert read
    for name, value in read.items():
        assert torch.equal(value, expected[name]), name


def test_a_forward_without_gradients_waits_too(device):
    model, optimizer, expected = stepped(device)
    plain = Model()
    plain.load_state_dict(expected)
    with torch.inference_mode():
        assert torch.equal(model(tokens(9)), plain(tokens(9)))


def test_zero_grad_of_the_model_does_not_wait(device):
    model, optimizer, _ = stepped(device)
    model.zero_grad()
    assert optimizer._session.late.pending


def test_weights_that_are_loaded_count(device):
    model, optimizer, _ = stepped(device)
    torch.manual_seed(9)
    loaded = Model().state_dict()
    model.load_state_dict(loaded)
    reference, other = make(device + "_reference", False)
    train(reference, other, range(1))
    reference.load_state_dict(loaded)
    assert train(model, optimizer, range(1, 4)) == train(reference, other, range(1, 4))


def test_a_second_backward_over_weights_that_were_updated_is_refused(device):
    model, optimizer = make(device, True)
    loss = loss_of(model, tokens(0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    model, optimizer = make(device, True)
    losses = train(model, optimizer, range(4))
    optimizer.close()
    model, optimizer = make(device, True, resume=True)
    losses += train(model, optimizer, range(4, 8))
    other, reference = make(device + "_whole", False)
    assert losses == train(other, reference, range(8))


def test_what_cannot_be_overlapped_is_named(device):
    model = Model()
    with pytest.raises(smartinf.UsageError, match="overlap is a bool"):
        smartinf.AdamW(model.parameters(), devices=[device], overlap=True)
    with pytest.raises(smartinf.UsageError, match="parameter scale is in no module"):
        smartinf.AdamW(model.named_parameters(), devices=[device], overlap=model.body)
