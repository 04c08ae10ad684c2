"""Token files from text and conversations, in the tool's hands and in the trainer's.

Usage: make_token_files_test.py SMARTINF
"""
import contextlib
import io
import json
import pathlib
import re
import runpy
import subprocess
import sys
import unittest
from unittest import mock

from train_runs import TrainCase

try:
    import numpy
    import tokenizers
    import torch
    import transformers
    from safetensors import safe_open
    from tokenizers import decoders, models, pre_tokenizers, trainers
except ImportError as missing:
    print(f"skipped: {missing}; scripts/setup.sh installs what is missing")
    sys.exit(77)

TOOL = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "make_token_files.py"
SPECIAL = ["<end>", "<|im_start|>", "<|im_end|>"]
PLAIN = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
         "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
MARKED = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
          "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}"
          "{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}")
# Leaves out what the assistant said before the last question.
FORGETFUL = ("{% for message in messages %}<|im_start|>{{ message.role }}\n"
             "{% if message.role != 'assistant' or loop.last %}{{ message.content }}{% endif %}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def say(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


class MakeTokenFiles(TrainCase):
    def setUp(self):
        super().setUp()
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator([self.corpus.read_text(), "how are you, thank you, täst ☃"], trainer)
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        self.model = self.folder / "model"
        self.use_template(PLAIN)
        self.lines = self.folder / "chats.jsonl"
        self.out = self.folder / "chats.safetensors"

    def use_template(self, template):
        self.tokenizer.chat_template = template
        self.tokenizer.save_pretrained(self.model)

    def make(self, *words, refused=False, says=(), out=None, tokenizer=None):
        """What the tool prints. In this process: transformers takes seconds to import."""
        arguments = [str(TOOL), "--tokenizer", str(tokenizer or self.model), "--out", str(out or self.out),
                     *map(str, words)]
        printed = io.StringIO()
        with (mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed),
              contextlib.redirect_stderr(printed)):
            try:
                runpy.run_path(str(TOOL), run_name="__main__")
                ended = None
            except SystemExit as error:
                ended = error.code
        text = printed.getvalue() + (ended or "")
        self.assertEqual(bool(ended), refused, text)
        for word in says:
            self.assertIn(word, text)
        self.assertEqual(list(self.folder.glob("**/*.partial")), [])
        return text

    def write_lines(self, *entries):
        self.lines.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n"
                                      for entry in entries), encoding="utf-8")

    def documents(self):
        """Text of each document, and of its tokens that count."""
        with safe_open(self.out, "numpy") as file:
            tokens = file.get_tensor("tokens")
            starts = file.get_tensor("document_starts").tolist()
            self.assertEqual(file.metadata()["vocabulary"], str(tokens.max() + 1))
            masked = "loss_mask" in file.keys()
            mask = file.get_tensor("loss_mask") if masked else numpy.ones(len(tokens), numpy.uint8)
        self.assertEqual(starts[0], 0)
        ends = starts[1:] + [len(tokens)]
        return [(self.tokenizer.decode(tokens[a:b]), self.tokenizer.decode(tokens[a:b][mask[a:b] == 1]))
                for a, b in zip(starts, ends, strict=True)]

    def test_only_the_assistants_words_count(self):
        self.write_lines({"messages": say("how are you", "täst ☃")},
                         {"messages": [{"role": "system", "content": "if"}] + say("for", "value", "else", "return x")})
        self.make(self.lines, says=["2 documents", "% of them count", "model.vocabulary = "])
        self.assertEqual(self.documents(), [
            ("<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\ntäst ☃<|im_end|>\n",
             "täst ☃<|im_end|>\n"),
            ("<|im_start|>system\nif<|im_end|>\n<|im_start|>user\nfor<|im_end|>\n<|im_start|>assistant\nvalue"
             "<|im_end|>\n<|im_start|>user\nelse<|im_end|>\n<|im_start|>assistant\nreturn x<|im_end|>\n",
             "value<|im_end|>\nreturn x<|im_end|>\n")])
        self.make(self.lines, "--count", "all", says=["100.0 % of them count"])
        for text, counted in self.documents():
            self.assertEqual(text, counted)

    def test_a_template_that_marks_generation_is_believed(self):
        self.use_template(MARKED)
        self.write_lines({"messages": say("for", "value", "else", "return x")})
        self.make(self.lines)
        self.assertEqual([counted for _, counted in self.documents()], ["value<|im_end|>return x<|im_end|>"])

    def test_a_template_that_forgets_is_refused_unless_all_counts(self):
        self.use_template(FORGETFUL)
        self.write_lines({"messages": say("for", "value")}, {"messages": say("for", "value", "else", "x")})
        self.make(self.lines, refused=True, says=["chats.jsonl:2: ", "message 2", "--count all"])
        self.assertFalse(self.out.exists())
        self.make(self.lines, "--count", "all")

    def test_prompts_completions_and_text(self):
        self.write_lines({"prompt": "value is", "completion": " index"}, {"text": "if value"},
                         {"prompt": say("for", "value", "else"), "completion": [say("", "x")[1]]})
        self.make(self.lines)
        self.assertEqual([counted for _, counted in self.documents()],
                         [" index<end>", "if value<end>", "x<|im_end|>\n"])
        self.assertEqual(self.documents()[0][0], "value is index<end>")

    def test_bad_lines_are_named_and_may_be_skipped(self):
        good = {"messages": say("for", "value")}
        bad = {2: ("{", "not JSON"), 3: ("[1]", "not a JSON object"), 4: ({"message": []}, "neither"),
               5: ({"messages": []}, "not a list of messages"),
               6: ({"messages": [{"content": "x"}]}, "message 1 of messages has no role"),
               7: ({"messages": [{"role": "user", "content": 5}]}, "no content that is text"),
               8: ({"messages": say("for")}, "no message of the assistant"),
               9: ({"prompt": "a", "completion": ""}, "completion is empty"),
               10: ({"text": ""}, "it is empty"), 11: ({"text": "\ud800"}, "refuses"), 12: ("[" * 100000, "not JSON")}
        self.write_lines(good, *(entry for entry, _ in bad.values()), "", good)
        self.make(self.lines, refused=True, says=["chats.jsonl:2: not JSON", "--skip-bad"])
        self.assertFalse(self.out.exists())
        done = self.make(self.lines, "--skip-bad", says=["2 documents", "11 bad documents were left out",
                                                         "and 1 more"])
        for number, (_, why) in list(bad.items())[:10]:
            self.assertRegex(done, rf"chats\.jsonl:{number}: left out: .*{why}")
        for number, (entry, why) in bad.items():
            with self.subTest(line=number):
                self.write_lines(good, entry)
                self.make(self.lines, refused=True, says=["chats.jsonl:2: ", why])

    def test_a_tokenizer_without_a_template(self):
        self.write_lines({"messages": say("for", "value")})
        (self.model / "chat_template.jinja").unlink()
        self.make(self.lines, refused=True, says=["chats.jsonl:1: ", "no chat template"])
        self.make(self.lines, refused=True, says=["--tokenizer FOLDER"], tokenizer=self.model / "tokenizer.json")

    def test_text_files_and_their_parts(self):
        folder = self.folder / "texts"
        folder.mkdir()
        (folder / "b.txt").write_text("index")
        (folder / "a.txt").write_text("if\n---\n\n---\nvalue")
        (folder / "empty.txt").write_text("")
        self.make(folder, "--split-at", "\\n---\\n")
        self.assertEqual([text for text, _ in self.documents()], ["if<end>", "value<end>", "index<end>"])
        (folder / "c.txt").write_bytes(b"\xff\xfe\x00")
        self.make(folder, refused=True, says=["c.txt: no UTF-8 text"])
        self.make(folder, "--skip-bad", says=["2 documents", "1 bad documents were left out"])

    def test_a_stream_of_tokens(self):
        out = self.folder / "stream"
        self.make(self.corpus, out=out, tokenizer=self.model / "tokenizer.json")
        tokens = numpy.fromfile(out / "tokens_000.bin", "<u2")[512:]
        self.assertEqual(self.tokenizer.decode(tokens), self.corpus.read_text())

    def test_loss_and_gradient_are_those_of_transformers(self):
        words = self.corpus.read_text().split(" ")
        lengths = [(2 + i % 5, 1 + i * i % 11) for i in range(60)]
        self.write_lines(*({"messages": say(" ".join(words[20 * i:20 * i + asked]),
                                            " ".join(words[20 * i + asked:20 * i + asked + answered]))}
                           for i, (asked, answered) in enumerate(lengths)))
        self.make(self.lines)
        flags = ["--data.paths", str(self.out), "--data.validation_paths", str(self.out), "--data.sequence", "96",
                 "--model.vocabulary", "400", "--train.validation_batches", "100", "--train.micro_batch", "1",
                 "--train.clip_norm", "0"]
        started = subprocess.run(self.command(self.recipe(steps=1), "count", flags), capture_output=True, text=True,
                                 timeout=120, check=True).stdout
        windows = int(re.search(r"60 documents or pieces of them in (\d+) windows", started)[1])
        self.assertLess(windows, 30, "several documents share a window")
        flags += ["--train.accumulation", str(windows)]  # a step has all
        self.train(self.recipe(steps=3, precision="f32"), "a", *flags)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.export("a", "a_f32", "--type", "f32"), dtype=torch.float32)
        self.train(self.recipe(steps=4, precision="f32"), "a", *flags)
        log = self.log("a")
        validation = next(line["validation_loss"] for line in log if "validation_loss" in line)
        step = next(line for line in log if line["step"] == 4)
        with safe_open(self.out, "pt") as file:
            tokens, mask = file.get_tensor("tokens").long(), file.get_tensor("loss_mask")
            starts = file.get_tensor("document_starts").tolist() + [len(tokens)]
        counted = sum(mask[begin + 1:end].sum().item() for begin, end in zip(starts, starts[1:]))
        total = 0
        for begin, end in zip(starts, starts[1:]):
            labels = torch.where(mask[begin:end] == 1, tokens[begin:end], -100)
            loss = model(tokens[None, begin:end], labels=labels[None], num_items_in_batch=counted).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        self.assertEqual(step["targets"], counted)
        self.assertEqual(step["tokens"], windows * 96)
        for there, here in ((total, validation), (total, step["loss"]), (norm, step["gradient_norm"])):
            self.assertLess(abs(there - here), 1e-5 * there)

    def test_what_is_made_is_trained_on_and_resumed_in_the_middle_of_an_epoch(self):
        words = self.corpus.read_text().split(" ")
        self.write_lines(*({"messages": say(" ".join(words[i:i + 7]), " ".join(words[i + 7:i + 12 + i % 40]))}
                           for i in range(0, 3000, 10)))
        self.make(self.lines)
        flags = ["--data.paths", str(self.out), "--train.epochs", "1.5", "--train.schedule", "linear",
                 "--data.evaluation", f"chats = {self.out}", "--train.validate_every", "8",
                 "--train.keep_best", "true", "--model.vocabulary", "400"]
        recipe = self.recipe().replace("_50", "_epochs")
        pathlib.Path(recipe).write_text("\n".join(line for line in pathlib.Path(self.recipe()).read_text().split("\n")
                                                  if not line.startswith("steps")))
        self.train(recipe, "whole", *flags)
        losses = self.losses("whole")
        self.assertLess(losses[-1][1], 0.8 * losses[0][1])
        steps = [line for line in self.log("whole") if "loss" in line]
        self.assertLess(sum(line["targets"] for line in steps), 0.9 * sum(line["tokens"] for line in steps))
        evaluated = [line for line in self.log("whole") if "evaluation_loss" in line]
        self.assertEqual(evaluated[0]["step"], 8)
        self.assertIn("chats", evaluated[0]["evaluation_loss"])
        best = min((line for line in evaluated), key=lambda line: line["validation_loss"])["step"]
        self.assertEqual([p.name for p in (self.folder / "whole/checkpoints/best").iterdir()], [f"step-{best:08}"])

        self.train(recipe, "parts", *flags)  # the same, but from the middle of its first epoch on
        self.assertEqual(self.losses("parts"), losses)
        stop = len(losses) // 3
        half = self.devices("half", 1)
        fixed = [flag for flag in flags if flag not in ("--train.epochs", "1.5")]
        constant = ["--train.schedule", "constant", "--train.steps"]
        self.train(recipe, "half", *fixed, *half, *constant, str(stop))
        self.train(recipe, "half", *fixed, *half, *constant, str(2 * stop))
        self.train(recipe, "other", *fixed, *constant, str(2 * stop))
        self.assertEqual(self.losses("half"), self.losses("other"))
        self.assertEqual(self.master_weights("half"), self.master_weights("other"))


if __name__ == "__main__":
    unittest.main()
