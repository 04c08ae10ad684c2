"""`python -m smartinf`."""

import ast
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib

import pytest

import smartinf
from smartinf import deepspeed

RECIPE_KEYS = pathlib.Path(__file__).parents[2] / "docs" / "recipe.md"

CONFIG = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme0", "pin_memory": True},
        "overlap_comm": True,
    },
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 4,
    "scheduler": {"type": "WarmupLR", "params": {}},
    "flops_profiler": {"enabled": False},
}


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "smartinf", *arguments], capture_output=True, text=True, timeout=600, **kwargs
    )


AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
NVME = {"device": "nvme", "nvme_path": "/nvme0", "pin_memory": True, "buffer_count": 4}
# As in DeepSpeed's documentation, transformers' and accelerate's.
EXAMPLES = {
    "zero2.json": {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": AUTO},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "steps_per_print": 2000,
    },
    "zero3.json": {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": AUTO},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
    },
    "nvme.json": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": NVME,
            "offload_param": NVME | {"max_in_cpu": 1e9},
            "aio": {"block_size": 262144},
            "zenflow": {"topk_ratio": 0.1},
        },
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": 1,
    },
    "plain.json": CONFIG,
    "sgd.json": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}, "zero_optimization": True},
    "old.json": {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 2, "cpu_offload": True}},
}
ACCELERATE = """
deepspeed_config: {gradient_clipping: 1.0, offload_optimizer_device: nvme, offload_optimizer_nvme_path: /nvme0,
  offload_param_device: nvme, offload_param_nvme_path: /nvme1, zero_stage: 3, gradient_accumulation_steps: 4}
distributed_type: DEEPSPEED
mixed_precision: bf16
"""


def said_of(tmp_path, name, config=None):
    path = tmp_path / name
    path.write_text(ACCELERATE if name.endswith("yaml") else json.dumps(EXAMPLES[name] if config is None else config))
    return deepspeed.report(str(path))


def blocks(said):
    """The code that was printed, by the line before it."""
    parts = re.split(r"^(?=\S.*:$)", said, flags=re.MULTILINE)
    return {part.split("\n")[0].rstrip(":"): textwrap.dedent("\n".join(part.split("\n")[1:])) for part in parts if part}


def block(said, start):
    return next(code for line, code in blocks(said).items() if line.startswith(start))


def test_import_ds_config(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    done = command("import-ds-config", str(path))
    assert done.returncode == 0, done.stderr
    call = block(done.stdout, "In a loop")
    for text in (
        "smartinf.AdamW(", "betas=(0.9, 0.95),", 'devices=["/nvme0"],', "max_grad_norm=1.0,", "accumulation_steps=4,",
        "release_gradients=True,",  # of stage 3
    ):  # fmt: skip
        assert text in call
    for without in ("stage 3", "scheduler", "flops_profiler", "overlap_comm", "gradient_accumulation"):
        assert without in done.stdout


@pytest.mark.parametrize("name", [*EXAMPLES, "default_config.yaml"])
def test_what_is_printed_is_python_and_a_recipe(name, tmp_path):
    """Every call parses, and knows its keywords; so does the recipe."""
    pytest.importorskip("transformers")
    import transformers

    import smartinf.hf

    said = said_of(tmp_path, name)
    code = "\n".join(code for line, code in blocks(said).items() if line.startswith(("The model", "In a loop", "With Trainer")))
    called = set()
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        called.add(text)
        if text == "LayerwiseTrainer":
            text = "transformers.Trainer"
        if text.startswith(("smartinf.", "transformers.")):
            function = eval(text, {"smartinf": smartinf, "transformers": transformers})
            known = set(inspect.signature(function).parameters)
            if text not in ("transformers.Trainer", "transformers.TrainingArguments"):
                known |= {"dtype", *smartinf.storage_options.StorageOptions.__annotations__}
            for keyword in node.keywords:
                if keyword.arg == "optimizer_class":
                    known |= set(inspect.signature(getattr(smartinf, keyword.value.attr)).parameters)
            assert {keyword.arg for keyword in node.keywords} <= known
    assert "smartinf.hf.attach" in called
    recipe = tomllib.loads(block(said, "With the command"))
    assert recipe["model"]["from"] == "MODEL"
    for table, entries in recipe.items():
        for entry in entries if isinstance(entries, list) else [entries]:
            assert set(entry) <= recipe_keys()[table]


def recipe_keys():
    known, section = {}, None
    for line in RECIPE_KEYS.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## \[+(\w+)\]", line):
            section = known.setdefault(heading[1], set())
        elif key := re.match(r"\| `(\w+)`", line):
            section.add(key[1])
    return known


def test_offloaded_parameters_are_streamed(tmp_path):
    for name, where in (("zero3.json", '["/nvme/smartinf"]'), ("default_config.yaml", '["/nvme0", "/nvme1"]')):
        said = said_of(tmp_path, name)
        assert re.search(r"smartinf.from_pretrained\(\s*\"MODEL\",\s*devices=" + re.escape(where), said)
        assert "class LayerwiseTrainer(smartinf.hf.StreamedTrainer, transformers.Trainer)" in said
        assert "release_gradients" not in block(said, "With Trainer")  # a streamed model's are always
    for name in ("zero3.json", "nvme.json", "plain.json"):
        assert "FSDP2" in said_of(tmp_path, name)
    said = said_of(tmp_path, "nvme.json")
    assert "zenflow: no equivalent" in said
    assert "aio: not needed" in said


def test_a_configuration_that_trainer_fills_in(tmp_path):
    """"auto" is Trainer's: what is printed is for Trainer, and the rest goes to TrainingArguments."""
    config = json.loads(json.dumps(CONFIG))
    config["optimizer"]["params"] = {"lr": "auto", "betas": [0.9, 0.95], "eps": "auto", "weight_decay": "auto"}
    config["gradient_clipping"] = config["bf16"]["enabled"] = config["train_batch_size"] = "auto"
    said = said_of(tmp_path, "ds.json", config)
    assert "args = transformers.TrainingArguments(..., gradient_accumulation_steps=4, adam_beta1=0.9, adam_beta2=0.95)" in said
    assert 'smartinf.hf.attach(trainer, devices=["/nvme0"], release_gradients=True)' in said
    assert "In a loop" not in said
    assert "lr_scheduler_type" in said
    assert "train_batch_size" not in said
    assert deepspeed.convert(config).arguments == {
        "betas": (0.9, 0.95), "devices": ["/nvme0"], "release_gradients": True, "accumulation_steps": 4,
    }  # fmt: skip


def test_values_that_deepspeed_takes_unasked_are_written():
    """Its decay is 0 and its gradients are not clipped unless the configuration says so; torch's, Trainer's and a recipe's
    own values are others."""
    made = deepspeed.convert(EXAMPLES["nvme.json"])
    assert made.arguments["weight_decay"] == 0.0
    assert made.arguments["max_grad_norm"] == float("inf")
    recipe = tomllib.loads(made.recipe)
    assert (recipe["train"]["weight_decay"], recipe["train"]["clip_norm"]) == (0.0, 0.0)
    sgd = tomllib.loads(deepspeed.convert({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}).recipe)
    assert (sgd["optimizer"]["beta1"], sgd["train"]["schedule"]) == (0.0, "constant")
    torchs = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
    assert deepspeed.convert(torchs).arguments["weight_decay"] == 0.01


@pytest.mark.parametrize("name", ["zero2.json", "nvme.json"])
def test_the_printed_lines_train(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import smartinf
    import smartinf.hf

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    said = said_of(tmp_path, name)
    code = "".join(code for line, code in blocks(said).items() if line.startswith(("The model", "With Trainer")))
    places = {"MODEL": "model", "/nvme0": "nvme0", "/nvme/smartinf": "nvme"}
    for place, here in places.items():
        code = code.replace(json.dumps(place), json.dumps(str(tmp_path / here)))
    own = f'{str(tmp_path / "out")!r}, use_cpu=True, max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True'
    code = code.replace("args = ...", f"args = transformers.TrainingArguments({own})").replace("    ...,", f"    {own},")
    window = torch.arange(16)
    names = {"smartinf": smartinf, "transformers": transformers, "model": model}
    names["dataset"] = [{"input_ids": window, "labels": window}] * 8
    exec(code, names)
    trained = smartinf.hf.unwrap(names["trainer"].optimizer)
    assert trained._session.lineage.updates == 2


def test_bad_configurations_are_named(tmp_path):
    assert command("import-ds-config").returncode == 2
    missing = command("import-ds-config", str(tmp_path / "none.json"))
    assert missing.returncode == 1
    assert "none.json" in missing.stderr
    (tmp_path / "bad.json").write_text("{")
    bad = command("import-ds-config", str(tmp_path / "bad.json"))
    assert bad.returncode == 1
    assert "not JSON" in bad.stderr
    for text, name, what in (
        ("[]", "a.json", "a JSON object is expected"),
        ('{"optimizer": []}', "b.json", "optimizer is \\[\\] in the configuration"),
        ('{"zero_optimization": {"stage": 3, "offload_param": "nvme"}}', "c.json", "offload_param is \"nvme\""),
        ("num_processes: 2", "d.yaml", "no deepspeed_config"),
        ("a: [", "e.yaml", "not YAML"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(smartinf.UsageError, match=what):
            deepspeed.report(str(tmp_path / name))


def test_everything_else_is_the_command(tmp_path):
    """A wheel has it inside; in a build tree it lies beside the package."""
    elsewhere = {**os.environ, "PATH": str(tmp_path)}
    done = command("doctor", "--json", env=elsewhere)
    if "neither in this package nor on PATH" in done.stderr:
        built = os.path.join(os.environ.get("SMARTINF_BINARY_DIR", "."), "bin", "smartinf")
        assert not os.path.exists(built)
        pytest.skip("the smartinf command has not been built")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    told = command("--help", env=elsewhere)
    assert told.returncode == 0
    assert "import-ds-config" in told.stdout
    assert "doctor" in told.stdout


@pytest.mark.parametrize(
    ("beside", "text"),
    [
        ("CMakeCache.txt", "the package is not built: cmake --build {} --target smartinf_core"),
        ("CMakePresets.json", "is the source of the package: run `pip install .` in {}"),
        ("python/smartinf/_core.cpython-27-x86_64-linux-gnu.so", "is for another Python than this Python 3"),
        ("README.md", "has no core module: install the package again"),
    ],
)
def test_without_the_core_module_it_says_what_to_do(beside, text, tmp_path):
    package = tmp_path / "python" / "smartinf"
    package.mkdir(parents=True)
    shutil.copy(smartinf.__file__, package)
    (tmp_path / beside).touch()
    done = command("doctor", env={**os.environ, "PYTHONPATH": str(package.parent)}, cwd=tmp_path)
    assert done.returncode != 0
    assert text.format(tmp_path) in done.stderr


def test_without_the_command_it_says_what_to_do(tmp_path, monkeypatch, capfd):
    from smartinf import __main__

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "a" / "b" / "smartinf" / "__main__.py"))
    assert __main__.main(["doctor"]) == 1
    assert __main__.main(["--help"]) == 0
    out, err = capfd.readouterr()
    assert "import-ds-config" in out
    assert "pip install ." in err
