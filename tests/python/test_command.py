"""`python -m smartinf`."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

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


def test_import_ds_config(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    done = command("import-ds-config", str(path))
    assert done.returncode == 0, done.stderr
    assert "smartinf.AdamW(" in done.stdout
    assert "betas=(0.9, 0.95)," in done.stdout
    assert "devices=['/nvme0']," in done.stdout
    assert "max_grad_norm=1.0," in done.stdout
    assert "release_gradients=True," in done.stdout  # of stage 3
    assert "accumulation_steps=4," in done.stdout
    assert 'path = "/nvme0"' in done.stdout
    for without in ("stage 3", "scheduler", "flops_profiler", "overlap_comm", "gradient_accumulation"):
        assert without in done.stdout


def test_a_configuration_that_trainer_fills_in(tmp_path):
    """"auto" is Trainer's: what is printed is for Trainer, and the rest goes to TrainingArguments."""
    config = json.loads(json.dumps(CONFIG))
    config["optimizer"]["params"] = {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": "auto"}
    config["gradient_clipping"] = config["bf16"]["enabled"] = config["train_batch_size"] = "auto"
    config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": "/nvme0"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    said = command("import-ds-config", str(path)).stdout
    assert "**smartinf.hf.optimizer(" in said
    assert "gradient_accumulation_steps=4, adam_beta1=0.9, adam_beta2=0.95)" in said
    assert "release_gradients=True," in said
    assert "optimizer = smartinf.AdamW(" not in said
    assert 'bf16 "auto": the recipe has precision = "bf16"' in said
    assert "lr_scheduler_type" in said
    assert "neither this package nor `smartinf train`" in said
    assert "train_batch_size" not in said
    _, arguments, _, _ = deepspeed.convert(config)
    assert arguments == {"devices": ["/nvme0"], "betas": (0.9, 0.95), "release_gradients": True, "accumulation_steps": 4}


def test_the_printed_call_works(device, tmp_path):
    torch = pytest.importorskip("torch")
    import smartinf

    config = json.loads(json.dumps(CONFIG))
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = device
    name, arguments, _, _ = deepspeed.convert(config)
    optimizer = getattr(smartinf, name)([torch.nn.Parameter(torch.zeros(4))], **arguments)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_the_recipe_has_known_keys_only():
    recipe = tomllib.loads(deepspeed.convert(CONFIG)[2])
    known, section = {}, None
    for line in RECIPE_KEYS.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## \[+(\w+)\]", line):
            section = known.setdefault(heading[1], set())
        elif key := re.match(r"\| `(\w+)`", line):
            section.add(key[1])
    assert recipe["train"]["clip_norm"] == 1.0
    assert recipe["train"]["accumulation"] == 4
    for name, table in recipe.items():
        tables = table if isinstance(table, list) else [table]
        for entry in tables:
            assert set(entry) <= known[name]


def test_bad_configurations_are_named(tmp_path):
    assert command("import-ds-config").returncode == 2
    missing = command("import-ds-config", str(tmp_path / "none.json"))
    assert missing.returncode == 1
    assert "none.json" in missing.stderr
    (tmp_path / "bad.json").write_text("{")
    bad = command("import-ds-config", str(tmp_path / "bad.json"))
    assert bad.returncode == 1
    assert "not JSON" in bad.stderr


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


def test_without_the_command_it_says_what_to_do(tmp_path, monkeypatch, capfd):
    from smartinf import __main__

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "a" / "b" / "smartinf" / "__main__.py"))
    assert __main__.main(["doctor"]) == 1
    assert __main__.main(["--help"]) == 0
    out, err = capfd.readouterr()
    assert "import-ds-config" in out
    assert "pip install ." in err
