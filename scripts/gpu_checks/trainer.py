"""The command: training resident, streamed from the host, from the drive and with spooled activations has the same losses and
weights; generate has the same text however its weights come."""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess

from rows import ROOT, check

CUDA_BYTES = 600 << 20  # that the plan sets aside for CUDA itself


def environment(here):
    found = dict(os.environ)
    found["SMARTINF_PYTHON"] = os.sys.executable
    if here.test_accelerator is not None:
        found["LD_PRELOAD"] = str(here.test_accelerator)
    return found


def call(here, *arguments, seconds=120):
    """What the command prints. Errors: RuntimeError with its last words."""
    done = subprocess.run(
        [here.build / "bin/smartinf", *map(str, arguments)], env=environment(here), text=True, capture_output=True,
        timeout=seconds, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}")[-400:])
    return done.stdout


def text_of(here):
    """A file with text to train on."""
    path = here.folder / "text.txt"
    if not path.exists():
        path.write_text("".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md"))))
    return path


def recipe(here, run, *more, layers=12, steps=4):
    return [
        "train", ROOT / "recipes/quickstart.toml", "--data.paths", text_of(here), "--data.validation_share", 0,
        "--data.sequence", 128, "--train.steps", steps, "--train.micro_batch", 2, "--train.precision", "bf16",
        "--train.validate_every", 0, "--train.sample_tokens", 0, "--train.warmup_steps", 1, "--model.layers", layers,
        "--model.width", 256, "--train.run", run, *more,
    ]  # fmt: skip


def least_host(here, run, *more):
    """--memory.host of the least that the plan takes, which it says where less is given."""
    try:
        call(here, *recipe(here, run, *more, "--memory.host", "50MB", "--print-plan"))
    except RuntimeError as error:
        found = re.search(r"needs ([\d.]+) (MiB|GiB) of the host's memory", str(error))
        if found is None:
            raise
        size = float(found[1]) * {"MiB": 1 << 20, "GiB": 1 << 30}[found[2]]
        return ["--memory.host", int(size * 1.01) + (1 << 20)]
    raise RuntimeError("50 MB of memory are enough for the plan")


def _trained(here, name, *more):
    """(losses, digests of the exported weights, what went wrong or None)."""
    run = here.folder / name
    try:
        lines = call(here, *recipe(here, run, *more, "--json")).splitlines()
        losses = [json.loads(line)["loss"] for line in lines if line.startswith('{"step"') and '"loss"' in line]
        call(here, "export", run, "--out", f"{run}-exported")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [], [], str(error)
    weights = sorted((here.folder / f"{name}-exported").glob("*.safetensors"))
    return losses, [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights], None


@check(seconds=150)
def trainer(here):
    accelerator = ["--memory.accelerator", (24 << 20) + (0 if here.test_accelerator else CUDA_BYTES)]
    host = least_host(here, here.folder / "plan", *accelerator)
    variants = {
        "streamed-from-host": accelerator,
        "streamed-from-drive": [*accelerator, *host],
        "recomputed": ["--memory.activations", "recompute"],
        "spooled": [*accelerator, "--memory.activations", "offload"],
        "early": [*accelerator, "--optimizer.overlap", "early", "--train.clip_norm", 0],
        "late": ["--optimizer.overlap", "late"],
    }
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() // 2))) as pool:
        wanted = {clip: pool.submit(_trained, here, f"resident-{clip}", "--train.clip_norm", clip) for clip in (1, 0)}
        found = {name: pool.submit(_trained, here, name, *more) for name, more in variants.items()}
    losses, _, why = wanted[1].result()
    here.row("resident", why is None, **({"why": why} if why else {"losses": losses}))
    for name, future in found.items():
        losses, weights, why = future.result()
        expected, expected_weights, _ = wanted[0 if name == "early" else 1].result()
        if why is None and losses != expected:
            why = f"losses {losses} instead of {expected}"
        elif why is None and weights != expected_weights:
            why = "the exported weights differ"
        here.row(name, why is None, **({"why": why} if why else {}))
    arguments = ["generate", here.folder / "resident-1", "--prompt-tokens", "100,101,102", "--tokens", 12]
    whole = call(here, *arguments)
    least = re.search(r"needs ([\d.]+) MiB of the accelerator's", _refusal(here, *arguments))
    size = int((float(least[1]) + 4) * (1 << 20)) if least else 0
    streamed = call(here, *arguments, "--accelerator-memory", size)
    here.row("generate", least is not None and streamed == whole, tokens=whole.strip()[:80])


def _refusal(here, *arguments):
    try:
        return call(here, *arguments, "--accelerator-memory", "1MB")
    except RuntimeError as error:
        return str(error)
