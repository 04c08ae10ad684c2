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
    assert 'path = "/nvme0"' in done.stdout
    for without in ("stage 3", "scheduler", "flops_profiler", "overlap_comm", "gradient_accumulation"):
        assert without in done.stdout


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
    """A wheel has it inside; in a build tree it is found on PATH."""
    built = os.path.join(os.environ.get("SMARTINF_BINARY_DIR", ""), "bin")
    done = command("doctor", "--json", env={**os.environ, "PATH": f"{built}:{os.environ['PATH']}"})
    if "not installed with this package" in done.stderr:
        pytest.skip("the smartinf command has not been built")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    without = command("doctor", env={**os.environ, "PATH": str(tmp_path)})
    assert without.returncode == 0 or "scripts/setup.sh" in without.stderr
