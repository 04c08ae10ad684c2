"""What `smartinf plan` says of a streamed model is what smartinf.from_pretrained() takes."""

import json
import os
import subprocess

import pytest
import torch

import smartinf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SMARTINF = os.path.join(os.environ.get("SMARTINF_BINARY_DIR", "build/release"), "bin", "smartinf")
MACHINE = """
name = "this"
[gpu]
name = "none"
peak_flops = 1e11
memory_bytes_per_s = 1e10
link_bytes_per_s = 1e10
[host]
memory_bytes = {host}
link_bytes_per_s = 5e9
update_bytes_per_s = 4e9
copy_bytes_per_s = 4e9
[[device]]
read_bytes_per_s = 1e9
write_bytes_per_s = 1e9
link_bytes_per_s = 5e9
update_bytes_per_s = 2e9
[software]
subgroup_elements = 65536
slots = 8
gradient_bytes = 2
weight_bytes = 2
overlapped = "overlapped"
gradient_spilled = false
offload_waits = false
"""


def test_a_memory_budget_of_the_plan_is_enough_and_less_than_its_least_is_refused(tmp_path):
    if not os.path.exists(SMARTINF):
        pytest.skip("the command is not built")
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=2048, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip

    def plan(host):
        (tmp_path / "machine.toml").write_text(MACHINE.format(host=host), encoding="ascii")
        words = [SMARTINF, "plan", str(folder), "--machine", str(tmp_path / "machine.toml"), "--with", "python"]
        words += ["--precision", "f32", "--batch", "1", "--seq", "32", "--json"]
        uses = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["uses"]
        return next(use for use in uses if use["with"] == "Python, streamed")

    least = plan(1)
    assert not least["fits"]
    budget = -(-least["memory_budget"] // 1000000)
    with pytest.raises(smartinf.UsageError, match="at least"):
        smartinf.from_pretrained(folder, devices=tmp_path / "a", memory_budget=f"{int(0.9 * budget)}MB")
    some = plan(least["host_bytes"] + (24 << 20))
    assert some["fits"]
    for i, use in enumerate((least, some)):
        model = smartinf.from_pretrained(
            folder, devices=tmp_path / f"b{i}", memory_budget=f"{-(-use['memory_budget'] // 1000000)}MB"
        )
        optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-3)
        tokens = torch.arange(32)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.close()
