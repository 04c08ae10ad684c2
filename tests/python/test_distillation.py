"""smartinf.distill: a student's blocks learn what the teacher's return, with the outputs of one block in memory or on
devices."""

import json
import pathlib

import pytest
import torch
from nightly import nightly

import smartinf

transformers = pytest.importorskip("transformers")
from smartinf import distillation  # noqa: E402

torch.set_num_threads(1)

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
}


def model(kind="llama", seed=0, **other):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **SHAPE | KINDS[kind] | other)
    return transformers.AutoModelForCausalLM.from_config(config)


def batches(count, seed=1):
    return list(torch.randint(0, 96, (count, 2, 12), generator=torch.Generator().manual_seed(seed)))


def weights(of):
    return {name: value.clone() for name, value in of.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pruned_student_learns_its_teacher(tmp_path, kind):
    teacher, data, unseen = model(kind), batches(6), batches(3, seed=9)
    student = smartinf.prune(teacher, data[:2], ffn=0.5, heads=0.5)
    assert student.config.intermediate_size == 32 and student.config.num_key_value_heads == 1
    made = smartinf.distill(
        teacher, student, data, devices=[tmp_path / "device"], out=tmp_path / "out", lr=2e-3, epochs=6, whole_epochs=2,
        inputs="student", evaluation=unseen,
    )  # fmt: skip
    # A block of the teacher is computed once a batch, not again for each block behind it.
    names = [f"model.layers.{layer}" for layer in range(3)]
    assert made.computed == dict.fromkeys(["embedding", *names, "head"], 6)
    for name in [*names, "whole"]:
        assert sum(made.losses[name][-6:]) < sum(made.losses[name][:6])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same(weights(loaded), weights(student))

    def far(logits):
        with torch.no_grad():
            target = teacher(torch.cat(unseen)).logits
            return torch.nn.functional.kl_div(
                logits.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
            )

    untrained = smartinf.prune(teacher, data[:2], ffn=0.5, heads=0.5)
    with torch.no_grad():
        assert far(loaded(torch.cat(unseen)).logits) < 0.9 * far(untrained(torch.cat(unseen)).logits)


@pytest.mark.parametrize("loss", ["mse", "cosine"])
@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_a_copy_has_no_loss(tmp_path, loss, inputs):
    teacher, student = model(), model()
    made = smartinf.distill(
        teacher, student, batches(3), devices=[tmp_path / "device"], loss=loss, inputs=inputs, whole_epochs=1
    )  # fmt: skip
    assert set(made.losses) == {"model.layers.0", "model.layers.1", "model.layers.2", "head", "whole"}
    assert all(found == 0 for losses in made.losses.values() for found in losses)
    assert same(weights(student), weights(teacher))


def test_top_k_and_the_rest_are_a_kl_divergence():
    torch.manual_seed(0)
    own, teacher = torch.randn(2, 5, 20, requires_grad=True), torch.randn(2, 5, 20)
    top = distillation._top_of(teacher, 4)
    found = distillation._TopKl.apply(own, *top)
    there = torch.zeros(2, 5, 20, dtype=torch.bool).scatter(-1, top[1], True)

    def as_five(logits):
        logs = logits.log_softmax(-1)
        rest = logs.masked_fill(there, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logs.gather(-1, top[1]), rest], -1).flatten(0, 1)

    expected = torch.nn.functional.kl_div(as_five(own), as_five(teacher), log_target=True, reduction="batchmean")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, own)[0] for loss in (found, expected)))


def test_streamed_models_and_outputs_on_devices_change_no_bit(tmp_path):
    data, learn = batches(4), {"lr": 1e-3, "epochs": 2, "whole_epochs": 1}
    expected = model(seed=5)
    smartinf.distill(model(), expected, data, devices=[tmp_path / "plain"], **learn)
    small = model(seed=5)
    made = smartinf.distill(model(), small, data, devices=[tmp_path / "a", tmp_path / "b"], outputs_memory=4096, **learn)
    assert made.outputs_on_devices == 2 * 4 * 4096  # two blocks' outputs, never three
    assert same(weights(small), weights(expected))
    teacher = smartinf.stream(model(), [tmp_path / "teacher"], keep=0)
    student = smartinf.stream(model(seed=5), [tmp_path / "student"], keep=0)
    smartinf.distill(teacher, student, data, out=tmp_path / "out", **learn)
    assert same(weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), weights(expected))


def test_a_student_of_half_the_depth(tmp_path):
    teacher, student = model(num_hidden_layers=4), model(seed=5, num_hidden_layers=2)
    made = smartinf.distill(
        teacher, student, batches(4), devices=[tmp_path / "device"], lr=5e-3, epochs=3,
        blocks=["model.layers.1", "model.layers.3"],
    )  # fmt: skip
    assert made.computed["model.layers.2"] == 4
    assert made.losses["model.layers.1"][-1] < made.losses["model.layers.1"][0]


TRAIN = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import test_distillation as here
    from smartinf import distillation

    class Printing(distillation.AdamW):
        def step(self):
            super().step()
            print(self.updates, 0, flush=True)

    distillation.AdamW = Printing
    distillation.distill(here.model(), here.model(seed=5), here.batches(4), devices=[sys.argv[2]], out=sys.argv[3], **here.LEARN)
"""
LEARN = {"lr": 1e-3, "epochs": 2, "whole_epochs": 2, "inputs": "student"}


@pytest.mark.parametrize("kills", [2, nightly(20)])
def test_kills_change_no_bit(tmp_path, processes, kills):
    expected, out = model(seed=5), tmp_path / "out"
    smartinf.distill(model(), expected, batches(4), devices=[tmp_path / "a"], **LEARN)
    here = str(pathlib.Path(__file__).parent)
    found = processes.train_and_kill(kills, TRAIN, here, str(tmp_path / "b"), str(out))
    assert max(found) == 4 * (2 * 4 + 2)  # three blocks and the head twice, the whole twice
    assert same(weights(transformers.AutoModelForCausalLM.from_pretrained(out)), weights(expected))


def test_what_does_not_fit_is_named(tmp_path):
    def refused(text, *given, **options):
        with pytest.raises(smartinf.UsageError, match=text):
            smartinf.distill(*given, **{"devices": [tmp_path / "device"]} | options)

    data = batches(2)
    refused("hidden size is 32 and the student's 64", model(), model(hidden_size=64), data)
    refused("vocabulary is 96 and the student's 128", model(), model(vocab_size=128), data)
    refused("3 blocks and the student 2.*blocks=", model(), model(num_hidden_layers=2), data)
    refused("no block 'layers.0'", model(), model(), data, blocks=["layers.0"] * 3)
    names = ["model.layers.0", "model.layers.1", "model.layers.1"]
    refused("the last of them 'model.layers.2'", model(), model(), data, blocks=names)
    refused(r"data\[1\] is \[2, 8\] where data\[0\] is \[2, 12\]", model(), model(), [data[0], data[1][:, :8]])
    refused("devices= is missing", model(), model(), data, devices=None)
    teacher, student = model(), model()
    for of, words in ((teacher, {"a": 0}), (student, {"b": 0})):
        folder = tmp_path / next(iter(words))
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
        of.config._name_or_path = str(folder)
    refused("tokenizers of teacher and student differ: .*/a/tokenizer.json and .*/b/tokenizer.json", teacher, student, data)
    with pytest.raises(smartinf.UsageError, match="no down_proj and o_proj"):
        smartinf.prune(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=96)), data)
