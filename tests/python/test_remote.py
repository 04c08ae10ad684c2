"""Optimizers and caches over devices of another machine: a server on this one (docs/remote.md)."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import smartinf
from smartinf.errors import Error, UsageError

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from served import Authority, Server  # noqa: E402

SMARTINF = os.path.join(os.environ.get("SMARTINF_BINARY_DIR", "build/release"), "bin", "smartinf")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    try:
        authority = Authority(SMARTINF, folder / "ca")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no certificates can be made here: {error}")
    if "without gRPC" in subprocess.run([SMARTINF, "serve", "none"], capture_output=True, text=True).stderr:
        pytest.skip("this build has no gRPC")
    with Server(authority, folder / "server", ("fast0", "fast1", "fast2")) as running:
        yield running


@pytest.fixture
def remote(server):
    return dict(zip(("certificate", "key", "ca"), server.authority.files("clients", "gpu1"), strict=True))


def model():
    torch.manual_seed(3)
    return torch.nn.Linear(300, 500)


def train(made, optimizer, steps, first=0):
    for step in range(first, first + steps):
        made.zero_grad()
        torch.manual_seed(step)
        made(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
    return [p.detach().clone() for p in made.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_same_bits_as_beside_a_local_device(server, remote, device):
    here = model()
    wanted = train(here, smartinf.AdamW(here.parameters(), lr=1e-2, devices=device, resume=True), 4)
    there, url = model(), server.url()
    with smartinf.AdamW(there.parameters(), lr=1e-2, devices=url, remote=remote, resume=True) as optimizer:
        train(there, optimizer, 2)
        with pytest.raises(Error, match="another optimizer of this process"):
            smartinf.AdamW(model().parameters(), devices=url, remote=remote, resume=True)
        with pytest.raises(UsageError, match="beside a device of this machine"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(70000))]})
    again = model()
    with smartinf.AdamW(again.parameters(), lr=1e-2, devices=url, remote=remote, resume=True) as optimizer:
        assert equal(train(again, optimizer, 2, first=2), wanted)
    begun = model()
    with smartinf.AdamW(begun.parameters(), lr=1e-2, devices=url, remote=remote, resume=False) as optimizer:
        assert equal(train(begun, optimizer, 4), wanted)


def test_the_files_may_be_in_the_environment(server, remote, monkeypatch):
    with pytest.raises(Error, match="remote.certificate|remote.ca"):
        smartinf.SGD(model().parameters(), lr=1e-2, devices=server.url("fast1"), resume=True)
    for name, file in remote.items():
        monkeypatch.setenv(f"SMARTINF_REMOTE_{name.upper()}", file)
    made = model()
    with smartinf.SGD(made.parameters(), lr=1e-2, momentum=0.9, devices=server.url("fast1"), resume=True) as optimizer:
        train(made, optimizer, 1)
    assert server.metrics("smartinf_device_steps_committed_total") > 0


def test_mistakes_are_named(server, remote, tmp_path):
    url = server.url("fast2")
    with pytest.raises(UsageError, match="remote has no 'cert'; it takes certificate, key, ca"):
        smartinf.AdamW(model().parameters(), devices=url, remote={"cert": "x"})
    with pytest.raises(UsageError, match="activations can only be on devices of this machine"):
        with smartinf.offload_activations(model(), devices=url):
            pass
    with pytest.raises(Error, match="fast9"):
        smartinf.AdamW(model().parameters(), devices=server.url("fast9"), remote=remote, resume=True)


def test_keys_and_values(server, remote, device):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip

    def text(*devices):
        with smartinf.DeviceCache(made, devices, remote=remote, max_length=128) as cache:
            made.set_attn_implementation("smartinf")
            prompts = torch.arange(1, 81).view(2, 40)
            more = {"max_new_tokens": 40, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            out = made.generate(prompts, past_key_values=cache, attention_mask=torch.ones_like(prompts), **more)
            return [out.sequences, *out.logits]

    wanted = text()
    assert equal(text(server.url("fast2")), wanted)
    assert equal(text(server.url("fast2"), device), wanted)
    left = [file.name for file in (server.folder / "fast2").iterdir()]
    assert not [name for name in left if name not in ("smartinf.tuning", "smartinf.lock")], left
