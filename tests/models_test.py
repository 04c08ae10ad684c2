"""Models of transformers' own making, random and small: the same logits and gradients here and there,
and folders that come back as they were.

Usage: models_test.py SMARTINF OUTPUTS_OF_FOLDER
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

OUTPUTS = str(pathlib.Path(sys.argv.pop(2)).resolve())

from small_models import COMMON, CONFIGS, WIDE_HEADS, FineTuneCase, make, read
from train_runs import ALL, SMARTINF

import safetensors.torch
import torch
import transformers


def gradients(model, folder, loss):
    """Of every parameter, by the name that it has in files."""
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    model.save_pretrained(folder)
    return read(folder)


class Models(FineTuneCase):
    def outputs(self, folder, tokens, ends=None):
        inputs = {"tokens": tokens.contiguous()}
        if ends is not None:
            inputs["document_ends"] = torch.tensor(ends)
        safetensors.torch.save_file(inputs, self.folder / "in.safetensors")
        subprocess.run([OUTPUTS, str(folder), "f32", str(self.folder / "in.safetensors"),
                        str(self.folder / "out.safetensors")], check=True)
        return safetensors.torch.load_file(self.folder / "out.safetensors")

    def near(self, here, there, name, limit=1e-5):
        scale = there.abs().max().clamp(min=1e-3)
        self.assertLess(((here - there).abs().max() / scale).item(), limit, name)

    def test_logits_and_gradients_are_those_of_transformers(self):
        torch.manual_seed(2)
        tokens = torch.randint(0, 199, (2, 49))  # longer than the windows, and than the rope's trained lengths
        for name, config in CONFIGS.items():
            with self.subTest(model=name):
                model = make(config, self.folder / name)
                here = self.outputs(self.folder / name, tokens)
                logits = model.train()(tokens[:, :-1]).logits
                self.near(here.pop("logits"), logits.flatten(0, 1).detach(), "logits")
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                there = gradients(model, self.folder / "gradients", loss)
                self.assertEqual(sorted(here), sorted(there))
                for tensor, gradient in there.items():
                    self.near(here[tensor], gradient, tensor, limit=5e-5)
                shutil.rmtree(self.folder / "gradients")

    def test_documents_do_not_see_each_other(self):
        tokens = torch.randint(0, 199, (2, 33))
        for name in ("llama", "mistral", "gemma3", "gpt2", "gemma2") if ALL else ("gemma3", "gpt2"):
            with self.subTest(model=name):
                make(CONFIGS[name], self.folder / name)
                whole = self.outputs(self.folder / name, tokens, [5, 6, 32, 52, 64])["logits"]
                for row, first, last in ((0, 0, 5), (0, 6, 32), (1, 0, 20), (1, 20, 32)):
                    alone = self.outputs(self.folder / name, tokens[row:row + 1, first:last + 1])["logits"]
                    self.near(whole[32 * row + first:32 * row + last], alone, (row, first))

    def test_what_is_imported_is_exported_bit_for_bit(self):
        cases = (("qwen3", torch.float16), ("gpt2", torch.float32), ("mixtral", torch.bfloat16), ("gemma3", torch.bfloat16),
                 ("llama3_rope", torch.bfloat16), ("qwen2", torch.bfloat16))
        for name, dtype in cases if ALL else cases[:4]:
            with self.subTest(model=name):
                config = CONFIGS[name].__class__.from_dict(dict(CONFIGS[name].to_dict(), vocab_size=256))
                make(config, self.folder / name, dtype)
                # A learning rate that changes nothing.
                self.fine_tune(self.folder / name, "run_" + name, "--train.lr", "1e-30", "--train.weight_decay", "0")
                out = self.export("run_" + name, "out_" + name)
                there, here = read(self.folder / name), read(out)
                self.assertEqual(sorted(here), sorted(there))
                for tensor, value in there.items():
                    self.assertTrue(torch.equal(here[tensor], value), tensor)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
                self.assertEqual(loaded.dtype, dtype)
                self.assertEqual(loaded.config.to_dict(), transformers.AutoConfig.from_pretrained(
                    self.folder / name).to_dict() | {"_name_or_path": str(out)})

    def test_a_type_that_config_json_does_not_name_is_that_of_the_files(self):
        folder = self.folder / "llama"
        make(CONFIGS["llama"].__class__.from_dict(dict(CONFIGS["llama"].to_dict(), vocab_size=256)), folder, torch.float16)
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))
        self.fine_tune(folder, "run", "--train.lr", "1e-30", "--train.weight_decay", "0")
        there, here = read(folder), read(self.export("run", "out"))
        for tensor, value in there.items():
            self.assertTrue(torch.equal(here[tensor], value) and here[tensor].dtype == value.dtype, tensor)
        folder.rename(self.folder / "elsewhere")  # the run has config.json, which does not say it
        refused = subprocess.run([SMARTINF, "export", self.folder / "run", "--out", self.folder / "again"],
                                 capture_output=True, text=True, check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr, r"config.json names no type.*cannot be read.*llama.*--type bf16, f16 or f32")
        self.assertFalse((self.folder / "again").exists())
        self.assertEqual({value.dtype for value in read(self.export("run", "f16", "--type", "f16")).values()}, {torch.float16})

    def test_a_folder_without_a_model_says_what_to_name(self):
        (self.folder / "hub" / "snapshots").mkdir(parents=True)
        for name, says in (("hub", "name a folder in snapshots/"), ("me/llama", "hf download")):
            self.assertIn(says, self.fine_tune(self.folder / name, "none", code=1))

    def test_fine_tuning_goes_as_with_torch(self):
        self.corpus.write_bytes(self.corpus.read_bytes()[:257])
        for name in ("gpt2", "qwen3", "mixtral"):
            with self.subTest(model=name):
                config = CONFIGS[name].__class__.from_dict(dict(CONFIGS[name].to_dict(), vocab_size=256))
                model = make(config, self.folder / name)
                self.fine_tune(self.folder / name, "run_" + name, *self.SAME_BATCH, "--train.lr", "1e-3", steps=50)
                self.same_curves("run_" + name, self.curve(model, 50, 1e-3, *self.rows()))

    def test_adapters_go_as_with_peft(self):
        try:
            import peft
        except ImportError:
            self.skipTest("peft is not installed")
        self.corpus.write_bytes(self.corpus.read_bytes()[:257])
        cases = {"gpt2": ["c_attn", "mlp.c_proj"], "qwen3": ["all-linear"], "llama": ["q_proj", "v_proj", "up_proj"]}
        for name, targets in cases.items():
            if name == "llama" and not ALL:
                continue
            with self.subTest(model=name):
                config = CONFIGS[name].__class__.from_dict(dict(CONFIGS[name].to_dict(), vocab_size=256))
                make(config, self.folder / name)
                flags = (*self.SAME_BATCH, "--lora.rank", "4", "--lora.alpha", "12", "--lora.targets",
                         ",".join(targets))
                # First values: A as it was drawn, B still zero.
                self.fine_tune(self.folder / name, "first_" + name, *flags, "--train.lr", "1e-30")
                first = self.export("first_" + name, "first_adapters_" + name)
                base = transformers.AutoModelForCausalLM.from_pretrained(self.folder / name)
                model = peft.PeftModel.from_pretrained(base, first, is_trainable=True)
                self.fine_tune(self.folder / name, "run_" + name, *flags, "--train.lr", "1e-2", steps=40)
                self.same_curves("run_" + name, self.curve(model, 40, 1e-2, *self.rows()))
                there = peft.get_peft_model_state_dict(model)
                here = read(self.export("run_" + name, "adapters_" + name))
                self.assertEqual(sorted(here), sorted(there))
                merged = transformers.AutoModelForCausalLM.from_pretrained(
                    self.export("run_" + name, "merged_" + name, "--merge"))
                tokens = torch.randint(0, 256, (1, 20))
                with torch.no_grad():
                    apart = (merged(tokens).logits - model(tokens).logits).abs().max()
                self.assertLess(apart.item(), 1e-2)

    def test_a_damaged_folder_is_named_and_leaves_nothing(self):
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=256)), self.folder / "good")
        tensors = read(self.folder / "good")
        gate = "model.layers.1.mlp.gate_proj.weight"

        def weights(changed):
            return lambda folder: safetensors.torch.save_file(changed, folder / "model.safetensors")

        def config(**changes):
            def change(folder):
                keys = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps({**keys, **changes}))
            return change

        def index(file):
            def change(folder):
                (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
                (folder / "model.safetensors.index.json").write_text(json.dumps(
                    {"weight_map": {gate: file, "lm_head.weight": "model-00001-of-00002.safetensors"}}))
            return change

        def cut(folder):
            with open(folder / "model.safetensors", "r+b") as file:
                file.truncate((folder / "model.safetensors").stat().st_size - 4)

        def pickled(folder):
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

        def pointer(folder):
            (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\n")

        def secret(folder):
            (folder / "chat_template.jinja").symlink_to("../corpus.txt")

        def generation(folder):
            (folder / "generation_config.json").write_text("{")

        def endless(folder):
            with open(folder / "vocab.json", "wb") as file:
                file.truncate(1 << 40)

        def overlap(folder):
            raw = (folder / "model.safetensors").read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:8 + length])
            first, second = sorted((k for k in header if k != "__metadata__"),
                                   key=lambda k: header[k]["data_offsets"])[:2]
            begin, end = header[second]["data_offsets"]
            header[second]["data_offsets"] = [begin - 4, end - 4]
            text = json.dumps(header).encode()
            (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length:])

        not_finite = tensors[gate].clone()
        not_finite[1, 2] = float("nan")
        cases = {
            "missing": (weights({k: v for k, v in tensors.items() if k != gate}), gate),
            "surplus": (weights({**tensors, "model.extra.weight": torch.zeros(3)}), "model.extra.weight"),
            "shape": (weights({**tensors, gate: torch.zeros(3, 4)}), f"{gate} is [3, 4]"),
            "type": (weights({**tensors, gate: tensors[gate].to(torch.int8)}), "of type I8"),
            "nan": (weights({**tensors, gate: not_finite}), f"element 50 of {gate} is nan"),
            "cut": (cut, "bytes are missing"),
            "file": (index("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
            "traversal": (index("../model.safetensors"), "not in the folder"),
            "pickled": (pickled, "pickled"),
            "pointer": (pointer, "git lfs pull"),
            "secret": (secret, "chat_template.jinja leads out of the model's folder"),
            "generation": (generation, "generation_config.json"),
            "fifo": (lambda folder: os.mkfifo(folder / "tokenizer.json"), "a FIFO"),
            "endless": (endless, "vocab.json is longer"),
            "overlap": (overlap, "two tensors have the same bytes"),
            "family": (config(model_type="bert"), "bert"),
            "key": (config(is_causal=False), "--model.ignored_keys is_causal"),
            "end": (config(eos_token_id="x"), "eos_token_id"),
            "rope": (config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "longrope"),
            "quantized": (config(quantization_config={"bits": 4}), "quantization_config"),
            "number": (config(num_hidden_layers="three"), "num_hidden_layers"),
        }
        for name, (change, says) in cases.items():
            with self.subTest(case=name):
                folder = self.folder / name
                shutil.copytree(self.folder / "good", folder)
                change(folder)
                code = 2 if name in ("secret", "fifo", "endless") else 1  # no files of a model
                self.assertIn(says, self.fine_tune(folder, "run", code=code))
                left = [p.relative_to(self.folder / "run").as_posix() for p in (self.folder / "run").rglob("*")
                        if p.is_file() and p.stat().st_size > 0]
                self.assertEqual(left, [])
        known = self.folder / "known"
        shutil.copytree(self.folder / "good", known)
        config(is_causal=False, _model_name_or_path="a/b", unk_token_id=0)(known)
        self.fine_tune(known, "run", "--model.ignored_keys", "is_causal")
        generate = [SMARTINF, "generate", str(known), "--prompt-tokens", "1", "--tokens", "1"]
        refused = subprocess.run(generate, capture_output=True, text=True)
        self.assertIn("--ignored-keys is_causal", refused.stderr)
        said = subprocess.run([*generate, "--ignored-keys", "is_causal"], capture_output=True, text=True)
        self.assertEqual(said.returncode, 0, said.stderr)
        self.assertIn("_model_name_or_path, unk_token_id change nothing", said.stdout + said.stderr)
        self.assertIn("beside model.from", self.fine_tune(known, "other", "--model.layers", "2", code=2))

    def test_a_run_goes_on_without_the_folder_it_came_from(self):
        config = CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, vocab_size=256))
        make(config, self.folder / "model", torch.bfloat16)
        (self.folder / "model/tokenizer_config.json").write_text('{"version": "1.0"}')
        self.fine_tune(self.folder / "model", "whole", steps=4)
        self.fine_tune(self.folder / "model", "parts", steps=2)
        (self.folder / "model").rename(self.folder / "away")
        self.fine_tune(self.folder / "model", "parts", steps=4)
        self.assertEqual([loss for _, loss in self.losses("parts")][2:],
                         [loss for _, loss in self.losses("whole")][2:])
        out = self.export("parts", "out")
        self.assertEqual((out / "tokenizer_config.json").read_text(), '{"version": "1.0"}')
        config = json.loads((self.folder / "away/config.json").read_text())
        (self.folder / "model").mkdir()
        (self.folder / "model/config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
        self.assertIn("not the one that the run was started with",
                      self.fine_tune(self.folder / "model", "parts", steps=6, code=1))


if __name__ == "__main__":
    unittest.main()
