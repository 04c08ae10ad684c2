"""What `smartinf generate` puts behind prompts: the tokens of transformers' own generate(), from folders
and from runs, in memory and streamed.

Usage: generate_test.py SMARTINF
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import unittest

from small_models import COMMON, CONFIGS, WIDE_HEADS, make, make_tokenizer
from train_runs import ALL, SMARTINF, STREAMED, StreamCase

import torch
import transformers

ENVIRONMENT = {**os.environ, "SMARTINF_PYTHON": sys.executable}


class Generate(StreamCase):
    def run_generate(self, folder, *words, code=0, env=None):
        done = subprocess.run([SMARTINF, "generate", str(folder), "--threads", "1", *map(str, words)],
                              capture_output=True, text=True, timeout=300, check=False, env=env or ENVIRONMENT)
        self.assertEqual(done.returncode, code, done.stdout[-2000:] + done.stderr[-2000:])
        return done

    def tokens(self, folder, prompts, *words):
        """What each prompt is continued with; prompts and results are numbers of tokens."""
        flags = [word for prompt in prompts for word in ("--prompt-tokens", ",".join(map(str, prompt)))]
        done = self.run_generate(folder, *flags, "--json", *words)
        return [json.loads(line)["tokens"] for line in done.stdout.splitlines()]

    def beside(self, model, prompts, tokens, **options):
        """The same by transformers, each prompt alone."""
        return [model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0,
                               **options)[0, len(prompt):].tolist() for prompt in prompts]

    def test_greedy_tokens_are_those_of_transformers(self):
        # Longer than the windows and the rope's trained lengths, in batches of several lengths.
        draw = torch.Generator().manual_seed(3)
        prompts = [torch.randint(0, 199, (length,), generator=draw).tolist() for length in (1, 5, 23)]
        # The others differ from these in what models_test.py compares of all.
        few = ("llama_tied_biases", "yarn_rope_mscale", "qwen2_window", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral")
        for name, config in CONFIGS.items():
            if name not in few and not ALL:
                continue
            with self.subTest(model=name):
                model = make(config, self.folder / name).eval()
                model.generation_config.eos_token_id = None
                (self.folder / name / "generation_config.json").unlink(missing_ok=True)
                here = self.tokens(self.folder / name, prompts, "--tokens", 30)
                self.assertEqual(here, self.beside(model, prompts, 30))
                self.assertGreater(len({token for row in here for token in row}), 3, "it says something")

    def test_an_end_token_ends_a_text(self):
        model = make(CONFIGS["qwen3"], self.folder / "model").eval()
        prompt = [[3, 1, 4]]
        whole = self.tokens(self.folder / "model", prompt, "--tokens", 20)[0]
        ends = [whole[7], whole[4]]

        def stop():
            flags = ("--prompt-tokens", "3,1,4", "--tokens", 20, "--json")
            return json.loads(self.run_generate(self.folder / "model", *flags).stdout)["stop"]
        before = stop()
        for file, text in (("config.json", ends[0]), ("generation_config.json", ends)):
            path = self.folder / "model" / file
            keys = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(keys | {"eos_token_id": text}))
            there = self.beside(model, prompt, 20, eos_token_id=text)[0]
            here = self.tokens(self.folder / "model", prompt, "--tokens", 20)[0]
            self.assertEqual(here, there[:-1], file)
            self.assertLess(len(here), 8)
        self.assertEqual((before, stop()), ("tokens", "end"))

    def test_drawn_tokens_follow_from_the_seed_alone(self):
        make(CONFIGS["gemma3"], self.folder / "model")
        prompts = [[7], [1, 2, 3], [9, 8]]
        flags = ("--tokens", 12, "--temperature", 1.5, "--top-k", 20, "--top-p", 0.9)
        together = self.tokens(self.folder / "model", prompts, *flags)
        alone = [self.tokens(self.folder / "model", [prompt], *flags)[0] for prompt in prompts]
        self.assertEqual(together, alone)
        self.assertNotEqual(together, self.tokens(self.folder / "model", prompts, *flags, "--seed", 2))
        greedy = self.tokens(self.folder / "model", prompts, "--tokens", 12)
        self.assertNotEqual(together, greedy)
        told = self.run_generate(self.folder / "model", "--prompt-tokens", "7", *flags, "--samples", 2, "--json").stdout
        samples = [(line["sample"], line["tokens"]) for line in map(json.loads, told.splitlines())]
        self.assertEqual(samples[0], (1, together[0]))
        self.assertEqual(samples[1][0], 2)
        self.assertNotEqual(samples[1][1], together[0])
        for narrow in (("--top-k", 1), ("--top-p", 1e-9)):
            self.assertEqual(self.tokens(self.folder / "model", prompts, *flags[:4], *narrow), greedy)


    def least_mib(self, folder, *words):
        """What a command needs at least; it depends on the machine's libraries."""
        told = self.run_generate(folder, *words, "--memory", "20MiB", code=1).stderr
        return float(re.search(r"needs ([\d.]+) MiB", told).group(1))

    def check_streamed(self, folder, whence):
        prompts = [[5, 6, 7, 8], [9]]
        resident = self.tokens(folder, prompts, "--tokens", 10)
        words = ("--prompt-tokens", "5,6,7,8", "--prompt-tokens", "9", "--tokens", 10)
        less = ("--memory", f"{self.least_mib(folder, *words) + 2:.0f}MiB")
        self.assertEqual(self.tokens(folder, prompts, "--tokens", 10, *less), resident)
        told = self.run_generate(folder, *words, *less).stderr
        self.assertRegex(told, rf"\d of 1\d units stay in memory; each token .* reads the others once, .* {whence}")

    def test_streamed_weights_give_the_same_tokens(self):
        flags = [*STREAMED, "--device.0.path", str(self.folder / "a"), "--device.1.path", str(self.folder / "b"),
                 "--device.0.bandwidth", "1", "--device.1.bandwidth", "1"]
        self.train(self.recipe(steps=3), "run", *flags)
        self.check_streamed(self.folder / "run", "from the devices")
        prompts = [[5, 6, 7, 8], [9]]
        self.assertEqual(self.tokens(self.export("run", "out"), prompts), self.tokens(self.folder / "run", prompts))
        # Files are read in larger pieces.
        config = dict(COMMON, hidden_size=512, intermediate_size=2048, num_hidden_layers=14)
        make(CONFIGS["llama"].__class__(**config), self.folder / "large", torch.bfloat16)
        self.check_streamed(self.folder / "large", "from the model's files")

    def fine_tune(self, folder, run, *flags):
        recipe = pathlib.Path(self.recipe(steps=12))
        text = recipe.read_text()
        recipe.write_text(f'[model]\nfrom = "{folder}"\n\n' + text[text.index("[data]"):])
        self.train(str(recipe), run, "--train.lr", "1e-2", "--train.precision", "f32", *flags)
        return self.folder / run

    def test_a_run_says_what_its_export_says(self):
        config = CONFIGS["qwen3"].__class__(**dict(WIDE_HEADS, vocab_size=256))
        make(config, self.folder / "model")
        prompts = [[100, 101, 102, 32], [58]]
        before = self.tokens(self.folder / "model", prompts)
        whole = self.fine_tune(self.folder / "model", "whole")
        adapted = self.fine_tune(self.folder / "model", "adapted", "--lora.rank", "4")
        for run, flags in ((whole, ()), (adapted, ("--merge",))):
            model = transformers.AutoModelForCausalLM.from_pretrained(self.export(run.name, run.name + "_out", *flags))
            here = self.tokens(run, prompts, "--tokens", 40)
            self.assertEqual(here, self.beside(model, prompts, 40))
            self.assertNotEqual(here, before, "it has learnt something")
        told = self.run_generate(self.export("adapted", "adapters"), "--prompt", "x", code=2).stderr
        self.assertIn("adapters, and not their model", told)
        # Of torch's optimizer in memory.
        memory = self.fine_tune(self.folder / "model", "memory", "--optimizer.where", "memory")
        self.assertEqual(len(self.tokens(memory, prompts, "--tokens", 3)[1]), 3)

    def test_adapters_go_with_the_weights_they_were_trained_beside(self):
        # Larger than both ends of a file, which were all that was compared once.
        config = dict(COMMON, vocab_size=256, hidden_size=128, intermediate_size=2048, num_hidden_layers=4)
        base = self.folder / "model"
        make(CONFIGS["llama"].__class__(**config), base)
        weights = base / "model.safetensors"
        sound = weights.read_bytes()
        self.assertGreater(len(sound), 6 << 20)
        lora = ("--lora.rank", "4", "--train.steps", "2")
        self.fine_tune(base, "run", *lora, "--checkpoint.every", "1")
        self.fine_tune(base, "memory", *lora, "--optimizer.where", "memory")
        whole = self.export("run", "whole", "--merge") / "model.safetensors"
        said = self.tokens(self.folder / "run", [[5, 6]])
        there = ("--checkpoint", self.folder / "run/checkpoints/step-00000001")
        recipe = next(self.folder.glob("*_12.toml"))

        def of_run(run):
            yield ("export", self.folder / run, "--out", self.folder / "out", "--merge")
            yield ("generate", self.folder / run, "--prompt-tokens", "5,6")
            yield self.command(recipe, run, (*lora[:2], "--train.steps", "3", "--train.lr", "1e-2",
                                             "--train.precision", "f32",
                                             *(("--optimizer.where", "memory") if run == "memory" else ())))[1:]

        flipped = bytearray(sound)
        flipped[len(sound) // 2 & ~3] ^= 1
        for changed in (bytes(flipped), bytes(sound[:-4] + bytes(4))):
            weights.write_bytes(changed)
            for words in (*of_run("run"), *of_run("memory"), (*next(of_run("run")), *there),
                          ("generate", self.folder / "run", "--prompt-tokens", "5,6", *there)):
                done = subprocess.run([SMARTINF, *map(str, words)], capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn("not those that the adapters were trained beside", done.stderr)
                self.assertIn(str(base), done.stderr)
            self.assertFalse((self.folder / "out").exists())
        # Alone they can be had, with a word about the folder that they name.
        done = subprocess.run([SMARTINF, "export", str(self.folder / "run"), "--out", str(self.folder / "adapters")],
                              capture_output=True, text=True, timeout=300, check=True)
        self.assertIn("they do not fit: model.from: the weights are not those", done.stderr)
        weights.write_bytes(sound)
        self.assertEqual((self.export("run", "again", "--merge") / "model.safetensors").read_bytes(),
                         whole.read_bytes())
        self.assertEqual(self.tokens(self.folder / "run", [[5, 6]]), said)

    def test_a_run_is_not_started_over_with_a_model_that_cannot_be_trained(self):
        base = self.folder / "model"
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=256)), base)
        sound = (base / "model.safetensors").read_bytes()
        whole = self.fine_tune(base, "run", "--train.steps", "2")
        state = whole / "state/smartinf.state"
        kept = state.read_bytes()
        run = json.loads((whole / "run.json").read_text())["run"][:8]
        recipe = next(self.folder.glob("*_12.toml"))
        spoilt = sound[:-4] + b"\0\0\xc0\x7f"
        for name, contents, flags in (("model.safetensors", spoilt, ()),
                                      ("model.safetensors", spoilt, ("--lora.rank", "4")),
                                      ("model.safetensors", sound[:-8], ()),
                                      ("chat_template.jinja", None, ())):
            file = base / name
            before = file.read_bytes() if file.exists() else None
            file.write_bytes(contents) if contents else os.mkfifo(file)
            code = 1 if contents else 2  # what is seen before the model is opened
            told = self.train(recipe, "run", "--train.precision", "f32", "--start-over", run, *flags, code=code)
            self.assertIn(name, told)
            self.assertEqual(state.read_bytes(), kept, told)
            file.unlink()
            if before:
                file.write_bytes(before)
        self.train(recipe, "run", "--train.precision", "f32", "--start-over", run, "--train.steps", "1")
        self.assertNotEqual(state.read_bytes(), kept)

    def test_text_goes_through_the_models_tokenizer(self):
        folder = self.folder / "model"
        make(CONFIGS["llama"].__class__(**dict(COMMON, vocab_size=301)), folder)
        fast = make_tokenizer(folder, self.corpus)
        prompts = {"def value(index):": fast("def value(index):")["input_ids"], "ä": fast("ä")["input_ids"]}
        there = {text: fast.decode(tokens + self.tokens(folder, [tokens], "--tokens", 20)[0],
                                   skip_special_tokens=True) for text, tokens in prompts.items()}
        for text, whole in there.items():
            # One text grows as tokens come; several are shown at the end.
            self.assertEqual(self.run_generate(folder, "--prompt", text, "--tokens", 20).stdout, whole + "\n")
        first, second = there.values()
        both = self.run_generate(folder, *[w for text in there for w in ("--prompt", text)], "--tokens", 20).stdout
        self.assertEqual(both, f"prompt 1:\n{first}\n\nprompt 2:\n{second}\n")
        chat = self.run_generate(folder, "--prompt", "if", "--chat", "--tokens", 5, "--json").stdout
        self.assertEqual(json.loads(chat)["prompt_tokens"], fast("<user>if<model>")["input_ids"])
        # A token that tokenizer_config.json alone has, as training has it.
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["extra_special_tokens"] = ["value("]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        there = transformers.AutoTokenizer.from_pretrained(folder)("def value(index")["input_ids"]
        self.assertNotEqual(there, fast("def value(index")["input_ids"])
        told = self.run_generate(folder, "--prompt", "def value(index", "--tokens", 1, "--json").stdout
        self.assertEqual(json.loads(told)["prompt_tokens"], there)
        self.assertIn("no tokenizer", self.run_generate(
            make_without_tokenizer(folder, self.folder / "bare"), "--prompt", "x", code=1).stderr)

    def test_bytes_are_text_where_the_vocabulary_is_256(self):
        recipe = self.recipe(steps=6)
        flags = ("--train.validate_every", "3", "--train.sample_prompts", "def,x", "--train.sample_tokens", "7")
        done = subprocess.run(self.command(recipe, "run", flags), capture_output=True, timeout=300, check=True)
        self.assertEqual(done.stdout.count(b"step 3: sample:\ndef"), 1)
        self.assertEqual(done.stdout.count(b"step 6: sample:\nx"), 1)
        done = self.run_generate(self.folder / "run", "--prompt", "def", "--tokens", 7, "--json")
        line = json.loads(done.stdout)
        self.assertEqual(line["prompt_tokens"], list(b"def"))
        self.assertEqual(len(line["tokens"]), 7)
        # Beyond the positions that it was trained for it says nothing.
        done = self.run_generate(self.folder / "run", "--prompt", "def", "--tokens", 100)
        self.assertIn("knows 32 positions", done.stderr)
        self.assertIn("\n29 tokens in", done.stderr)

    def test_wrong_input_is_named(self):
        make(CONFIGS["llama"], self.folder / "model")
        model = self.folder / "model"
        for words, code, says in (
                ((model, "--prompt-tokens", ",".join(["1"] * 64)), 2, "has 64 tokens, and the model knows 64"),
                ((model, "--prompt-tokens", ""), 2, "prompt 1 is empty"),
                ((model, "--prompt-tokens", "1,x"), 2, "not a list of numbers"),
                ((model, "--prompt-tokens", "1,199"), 2, "token 199, and the model has 199 tokens"),
                ((model,), 2, "there is no prompt"),
                ((model, "--prompt", "a", "--prompt-tokens", "1"), 2, "both given"),
                ((model, "--prompt-tokens", "1", "--temperature", "-1"), 2, "--temperature is -1"),
                ((model, "--prompt", "a"), 1, "no tokenizer.json"),
                ((self.folder / "none", "--prompt", "a"), 1, "neither the folder of a run"),
                ((self.folder, "--prompt", "a"), 1, "neither the folder of a run"),
                ((model, "--prompt-tokens", "1", "--memory", "1MiB"), 1, "may be used")):
            self.assertIn(says, self.run_generate(*words, code=code).stderr)
        (model / "tokenizer.json").write_text("{}")
        told = self.run_generate(model, "--prompt", "a", code=1).stderr
        self.assertIn(f"the tokenizer: {model}: transformers cannot load it", told)
        # A Python without the package.
        python = self.folder / "python"
        python.write_text(f"#!/bin/sh\nexec {sys.executable} -S -I \"$@\"\n")
        python.chmod(0o755)
        told = self.run_generate(model, "--prompt", "a", code=1, env=ENVIRONMENT | {"SMARTINF_PYTHON": str(python)})
        self.assertIn("has no tokenizers", told.stderr)

    def test_an_interrupt_ends_it(self):
        make(CONFIGS["llama"].__class__(**dict(COMMON, max_position_embeddings=100000)), self.folder / "model")
        with subprocess.Popen([SMARTINF, "generate", str(self.folder / "model"), "--prompt-tokens", "1,2",
                               "--tokens", "90000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.assertEqual(process.stdout.read(4), b"1 2 ")
            process.send_signal(signal.SIGINT)
            output, told = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, told)
        self.assertTrue(output.endswith(b"\n"))
        self.assertIn(b"stopp", told)


def make_without_tokenizer(folder, bare):
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, bare)
    return bare


if __name__ == "__main__":
    unittest.main()
