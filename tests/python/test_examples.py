"""The examples run as they are written."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_train_one_line(tmp_path):
    first = float(example("train_one_line.py", tmp_path / "device", 5).split()[-1])
    later = float(example("train_one_line.py", tmp_path / "device", 100).split()[-1])
    assert later < first


def test_release_gradients(tmp_path):
    assert "gradient norm" in example("release_gradients.py", tmp_path / "device")


def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = example("trainer.py", tmp_path / "device", tmp_path / "out")
    assert "train_loss" in out
    assert (tmp_path / "out" / "checkpoint-20" / "smartinf" / "checkpoint.json").exists()
    example("trainer.py", tmp_path / "device", tmp_path / "out", "--resume")


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


def test_finetune(tmp_path, model):
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


def test_streamed_trainer(tmp_path, model):
    transformers = pytest.importorskip("transformers")
    text = EXAMPLES / "finetune.py"
    whole = example("streamed_trainer.py", model, text, tmp_path / "o1", tmp_path / "d1", "--steps", 2, "--keep", 0)
    assert "train_loss" in whole
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "o1" / "final")
    pytest.importorskip("peft")
    example("streamed_trainer.py", model, text, tmp_path / "o2", tmp_path / "d2", "--steps", 2, "--keep", 0, "--lora")
    assert (tmp_path / "o2" / "final" / "adapter_model.safetensors").exists()


def test_streamed_accelerate(tmp_path, model):
    text = EXAMPLES / "finetune.py"
    out = example("streamed_accelerate.py", model, text, tmp_path / "out", tmp_path / "device", "--steps", 4, "--keep", 0)
    assert len(re.findall(r"step \d loss", out)) == 4
    assert (tmp_path / "out" / "state" / "smartinf").is_dir()


def test_streamed_trl(tmp_path, model):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    for way in ([], ["--dpo"]):
        out = example("streamed_trl.py", model, tmp_path / "out", tmp_path / "-".join(["d", *way]), "--steps", 2, "--keep", 0, *way)
        assert "train_loss" in out


def test_lightning_module(tmp_path):
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
