"""The examples run as they are written."""

import functools
import json
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def ranks():
    """ranks(world, name, *arguments, **job): what an example prints on several ranks, as torchrun would start it."""
    # They are forked, so that what takes long is imported once.
    program = """
import contextlib, ranks_worker
with contextlib.suppress(ImportError):
    import torch._dynamo, smartinf.hf
ranks_worker.serve(ranks_worker.main)
"""
    server = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ranks(world, name, *arguments, **job):
        job |= {"world": world, "script": [str(EXAMPLES / name), *map(str, arguments)]}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        out = ""
        for line in server.stdout:
            if line.startswith("ended"):
                assert line == "ended 0\n"
                return out
            out += line
        raise AssertionError("the server of ranks has ended")

    yield ranks
    server.stdin.close()
    server.wait(timeout=600)


@pytest.fixture
def example(ranks):
    """example(name, *arguments): what an example prints in a process of its own."""
    return functools.partial(ranks, 0)


def test_train_one_line(tmp_path, example):
    first = float(example("train_one_line.py", tmp_path / "device", 5).split()[-1])
    later = float(example("train_one_line.py", tmp_path / "device", 100).split()[-1])
    assert later < first


def test_release_gradients(tmp_path, example):
    assert "gradient norm" in example("release_gradients.py", tmp_path / "device")


@pytest.mark.nightly
def test_co_distillation(tmp_path, example):
    pytest.importorskip("transformers")
    first = example("co_distillation.py", tmp_path / "device", tmp_path / "out", 4)
    later = example("co_distillation.py", tmp_path / "device", tmp_path / "out", 40)
    assert "step 4 of" not in first and "goes on from step 4" in later
    losses = [float(line.split()[-1]) for line in later.splitlines() if line.startswith("student")]
    assert losses[-1] < losses[0]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "student")


@pytest.mark.nightly
def test_trainer(tmp_path, example):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = example("trainer.py", tmp_path / "device", tmp_path / "out")
    assert "train_loss" in out
    assert (tmp_path / "out" / "checkpoint-20" / "smartinf" / "checkpoint.json").exists()
    example("trainer.py", tmp_path / "device", tmp_path / "out", "--resume")


def test_trainer_with_fsdp2(tmp_path, ranks):
    """Its last ten steps again, from its checkpoint and over other devices, give the same bits."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = tmp_path / "out"

    def saved(name):
        dcp_to_torch_save(out / "checkpoint-20" / name, tmp_path / "saved.pt")
        return torch.load(tmp_path / "saved.pt")

    assert "train_loss" in ranks(2, "trainer.py", tmp_path / "device", out, fsdp2_plugin=True)
    assert not (out / "checkpoint-10" / "smartinf").exists()
    weights, state = saved("pytorch_model_fsdp_0")["model"], saved("optimizer_0")["optimizer"]["state"]
    (out / "checkpoint-20").rename(tmp_path / "first")
    ranks(2, "trainer.py", tmp_path / "other", out, "--resume", fsdp2_plugin=True)
    again = saved("pytorch_model_fsdp_0")["model"]
    assert all(torch.equal(value, again[name]) for name, value in weights.items())
    again = saved("optimizer_0")["optimizer"]["state"]
    assert all(torch.equal(value, again[name][key]) for name, of in state.items() for key, value in of.items())


@pytest.fixture
def model(tmp_path):
    """A folder with a small Llama and its tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.ByteLevelBPETokenizer()
    words.train([str(EXAMPLES / "finetune.py")], vocab_size=300, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, eos_token="\n", pad_token="\n"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_finetune(tmp_path, model, example):
    """With every setting of docs/finetune.md."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = EXAMPLES / "finetune.py"

    def run(*more):
        places = [tmp_path / name for name in ("model", text, "out", "nvme0", "nvme1")]
        small = ["--sequence", 32, "--accumulation", 2, "--save-steps", 2, "--gradient-budget", "1MiB"]
        return example("finetune.py", *places, *small, *more)

    first = run("--steps", 2)
    norms = [float(norm) for norm in re.findall(r"'grad_norm': '?([0-9.e+-]+)", first)]
    assert len(norms) == 2
    assert min(norms) > 0
    assert any((tmp_path / "out" / "checkpoint-2" / "smartinf").iterdir())
    resumed = run("--steps", 3, "--resume")
    assert len(re.findall("'grad_norm'", resumed)) == 1
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "final")
    assert tuned.dtype == torch.bfloat16
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "final")("import", return_tensors="pt")
    assert tuned.generate(ids.input_ids, max_new_tokens=4, do_sample=False).shape[1] > ids.input_ids.shape[1]


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_distill(tmp_path, model, example, stream):
    transformers = pytest.importorskip("transformers")
    texts = [EXAMPLES / "finetune.py", EXAMPLES / "trainer.py"]
    small = ["--tokens", 640, "--length", 32, "--whole-epochs", 1, *(["--stream", tmp_path / "teacher"] if stream else [])]
    out = example("distill.py", model, *texts, tmp_path / "device", tmp_path / "out", *small)
    assert "of the gap closed with 640 tokens" in out
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert student.config.intermediate_size == 48


@pytest.mark.nightly
def test_streamed_trainer(tmp_path, model, example):
    transformers = pytest.importorskip("transformers")
    text = EXAMPLES / "finetune.py"
    whole = example("streamed_trainer.py", model, text, tmp_path / "o1", tmp_path / "d1", "--steps", 2, "--keep", 0)
    assert "train_loss" in whole
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "o1" / "final")
    pytest.importorskip("peft")
    example("streamed_trainer.py", model, text, tmp_path / "o2", tmp_path / "d2", "--steps", 2, "--keep", 0, "--lora")
    assert (tmp_path / "o2" / "final" / "adapter_model.safetensors").exists()


def test_streamed_accelerate(tmp_path, model, example):
    text = EXAMPLES / "finetune.py"
    out = example("streamed_accelerate.py", model, text, tmp_path / "out", tmp_path / "device", "--steps", 4, "--keep", 0)
    assert len(re.findall(r"step \d loss", out)) == 4
    assert (tmp_path / "out" / "state" / "smartinf").is_dir()


@pytest.mark.nightly
def test_streamed_trl(tmp_path, model, example):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    for way in ([], ["--dpo"]):
        out = example("streamed_trl.py", model, tmp_path / "out", tmp_path / "-".join(["d", *way]), "--steps", 2, "--keep", 0, *way)
        assert "train_loss" in out


def loss_of(text):
    return float(re.fullmatch(r"loss (\S+)\n", text)[1])


def test_train_ddp(tmp_path, ranks):
    first = loss_of(ranks(2, "train_ddp.py", tmp_path / "device", 5))
    assert loss_of(ranks(2, "train_ddp.py", tmp_path / "device", 50)) < first


def test_train_fsdp2(tmp_path, ranks):
    """Two ranks, and one that goes on from their checkpoint."""
    first = loss_of(ranks(2, "train_fsdp2.py", tmp_path / "device", tmp_path / "saved", 5))
    assert loss_of(ranks(1, "train_fsdp2.py", tmp_path / "other", tmp_path / "saved", 50)) < first


@pytest.mark.parametrize("fsdp2_plugin", [False, True])
def test_train_accelerate(tmp_path, ranks, fsdp2_plugin):
    """The second run goes on from the first one's state."""
    pytest.importorskip("accelerate")
    arguments = ["train_accelerate.py", tmp_path / "device", tmp_path / "saved"]
    first = loss_of(ranks(2, *arguments, 5, fsdp2_plugin=fsdp2_plugin))
    assert loss_of(ranks(2, *arguments, 50, fsdp2_plugin=fsdp2_plugin)) < first
    assert (tmp_path / "saved" / ("optimizer_0" if fsdp2_plugin else "smartinf")).is_dir()


def test_lightning_module(tmp_path, example):
    """Stopped after 6 steps, resumed on other devices: the losses of the whole run."""
    pytest.importorskip("lightning")

    def losses(device, out, *arguments):
        text = example("lightning_module.py", tmp_path / device, tmp_path / out, *arguments)
        return re.findall(r"step \d+ loss \S+", text)

    whole = losses("d1", "o1", 10)
    assert len(whole) == 10
    first = losses("d2", "o2", 6)
    assert first + losses("d3", "o3", 10, tmp_path / "o2" / "last.ckpt") == whole


def test_every_example_is_run():
    tested = set(re.findall(r'"(\w+\.py)"', pathlib.Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
