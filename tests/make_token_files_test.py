"""Token files from text and conversations, in the tool's hands and in the trainer's.

Usage: make_token_files_test.py SMARTINF
"""
import gzip
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
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
sys.path.insert(0, str(TOOL.parent))
import make_token_files  # noqa: E402
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


LAST_QUESTION = ("{% set n = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
                 "{% set n.last = loop.index0 %}{% endif %}{% endfor %}")
# As Qwen3's: thoughts of earlier turns are not written.
THINKS = (LAST_QUESTION + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[[ "
          "{% if loop.index0 > n.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
          "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|> ]]"
          "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# As DeepSeek-R1's: the beginning of the assistant's turn opens a thought, and what is written has none.
REASONS = ("{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>[[ "
           "{{ m.content.split('</think>')[-1] }}<end> ]]"
           "{% else %}{{ m.content }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}")
# As Mistral's: the system's words stand in the last question.
SYSTEM_LAST = (LAST_QUESTION + "{% for m in messages %}{% if m.role == 'user' %}[INST] "
               "{% if loop.index0 == n.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
               "{{ m.content }}[/INST]{% elif m.role == 'assistant' %}[[  {{ m.content | trim }}<end> ]]{% endif %}"
               "{% endfor %}")
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}[[ {{ m.content }}"
          "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|> ]]"
          "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# No token ends a turn.
LINES = ("{% for m in messages %}{% if m.role == 'assistant' %}model: [[ {{ m.content }}\n ]]{% else %}{{ m.content }}\n"
         "{% endif %}{% endfor %}{% if add_generation_prompt %}model: {% endif %}")


def marked(template):
    """The template with its marks of what the assistant says, and without."""
    return (template.replace("[[ ", "{% generation %}").replace(" ]]", "{% endgeneration %}"),
            template.replace("[[ ", "").replace(" ]]", ""))


def call(arguments, content=None):
    return {"role": "assistant", "content": content,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}]}


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
        """What the tool prints. In this process and one that it forks: transformers takes seconds to import."""
        arguments = [str(TOOL), "--tokenizer", str(tokenizer or self.model), "--out", str(out or self.out),
                     *map(str, words)]
        with tempfile.TemporaryFile("w+") as printed:
            sys.stdout.flush()
            kept = [os.dup(1), os.dup(2)]
            for number in (1, 2):
                os.dup2(printed.fileno(), number)
            try:
                with mock.patch.object(sys, "argv", arguments):
                    runpy.run_path(str(TOOL), run_name="__main__")
            except SystemExit as error:
                ended = error.code
            finally:
                sys.stdout.flush()
                for number, held in enumerate(kept, 1):
                    os.dup2(held, number)
                    os.close(held)
            printed.seek(0)
            text = printed.read()
        self.assertEqual(bool(ended), refused, text)
        self.assertNotIn("Traceback", text)
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
             "täst ☃<|im_end|>"),
            ("<|im_start|>system\nif<|im_end|>\n<|im_start|>user\nfor<|im_end|>\n<|im_start|>assistant\nvalue"
             "<|im_end|>\n<|im_start|>user\nelse<|im_end|>\n<|im_start|>assistant\nreturn x<|im_end|>\n",
             "value<|im_end|>return x<|im_end|>")])
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
        told = self.make(self.lines, "--for-recipe", "new", refused=True, says=["error: ", "chats.jsonl:2: ", "message 2"])
        self.assertNotRegex(told, "--count|--skip-bad")
        self.assertFalse(self.out.exists())
        self.make(self.lines, "--count", "all")

    def test_what_counts_is_what_a_template_with_marks_says(self):
        system = [{"role": "system", "content": "if else"}]
        plain = [say("for", "value"), say("for", "value", "else", "return x"), system + say("a", "b", "c", "d", "e", "f"),
                 say("for \n", " value \n", "  else", "x\n\n"), say("x" * 300, "<end>", "[INST]", "model: y")]
        tools = [say("for") + [call({"a": "ä"}), {"role": "tool", "content": "5"}, {"role": "assistant", "content": "six"}],
                 say("for", "if", "x") + [call({"a": 1}, "I call"), {"role": "tool", "content": "5"}, call({"a": 2}),
                                          {"role": "tool", "content": "5"}] + say("", "six", "a", "b")[1:],
                 say("for") + [call({"a": 1})]]
        thoughts = [[dict(m, reasoning_content="hm") if m["role"] == "assistant" else m for m in messages]
                    for messages in plain + tools]
        assistant_first = [say("", "hello", "x", "y")[1:]]
        for name, template, conversations in (
                ("chatml", CHATML, plain + tools + assistant_first), ("thinks", THINKS, thoughts),
                ("reasons", REASONS, plain + [say("a", "<think>b</think>c", "d", "<think>e</think>f")]),
                ("system", SYSTEM_LAST, plain), ("lines", LINES, plain)):
            with self.subTest(template=name):
                with_marks, without = marked(template)
                there = []
                for messages in conversations:
                    made = self.tokenizer.apply_chat_template(
                        messages, chat_template=with_marks, return_dict=True, return_assistant_tokens_mask=True)
                    counted = [t for t, m in zip(made["input_ids"], made["assistant_masks"], strict=True) if m]
                    there.append((self.tokenizer.decode(made["input_ids"]), self.tokenizer.decode(counted)))
                self.use_template(without)
                self.write_lines(*({"messages": messages} for messages in conversations))
                self.make(self.lines)
                self.assertEqual(self.documents(), there)

    def test_how_often_a_template_is_applied_does_not_grow_with_the_messages(self):
        documents = make_token_files.Documents(make_token_files.Tokenizer(self.model), "assistant", None)
        render = mock.Mock(side_effect=documents.tokenizer.render)
        with mock.patch.object(documents.tokenizer, "render", render):
            documents.of_entry({"messages": say(*map(str, range(400)))})
        self.assertLess(render.call_count, 8)

    def test_prompts_completions_and_text(self):
        self.write_lines({"prompt": "value is", "completion": " index"}, {"text": "if value"},
                         {"prompt": say("for", "value", "else"), "completion": [say("", "x")[1]]})
        self.make(self.lines)
        self.assertEqual([counted for _, counted in self.documents()],
                         [" index<end>", "if value<end>", "x<|im_end|>"])
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
        self.make(self.lines, refused=True, says=["messages need the tokenizer's folder"], tokenizer=self.model / "tokenizer.json")

    def test_json_is_known_by_what_is_in_it(self):
        entry = {"messages": say("for", "value")}
        pretty, line = json.dumps([entry] * 2, indent=1), json.dumps(entry)
        (self.folder / "some").mkdir()
        for name, text in (("a.json", pretty), ("b.JSONL", line + "\n" + line), ("c.ndjson", line + "\n\n" + line),
                           ("d.txt", pretty), ("e", "\ufeff" + line + "\n" + line), ("f.jsonl.txt", line + "\n" + line),
                           ("g.json", json.dumps(entry, indent=1) + json.dumps(entry, indent=1)),
                           ("h.json", json.dumps([say("for", "value")] * 2)),
                           ("i.data", json.dumps({"conversations": [{"from": "human", "value": "for"},
                                                                    {"from": "gpt", "value": "value"}]}) * 2)):
            with self.subTest(file=name):
                path = self.folder / "some" / name
                path.write_text(text, encoding="utf-8")
                self.make(path, says=["2 documents"])
                self.assertEqual([counted for _, counted in self.documents()], ["value<|im_end|>"] * 2)
        instructions = [{"instruction": "for", "input": "", "output": "value"}]
        for name, text, why in (("a.json", json.dumps(instructions), 'a.json:entry 1: neither "messages" .*"instruction"'),
                                ("b.json", json.dumps({"train": [entry]}), "no document in it"),
                                ("c.json", "[1, 2]", "no document in it"), ("d.json", line + ",\n", "not JSON"),
                                ("e.txt", line + "\n" + line[:-3], "not JSON"), ("f.csv", "a,b", "a table is not read"),
                                ("g.jsonl", '{"messages": [{"from": "observation", "value": "x"}]}', "observation")):
            with self.subTest(file=name):
                (self.folder / "some" / name).write_text(text)
                self.assertRegex(self.make(self.folder / "some" / name, refused=True), why)
        for text in ("[1] for index\n", "{value} else", '"if"', '{"a": 1}\nfor value'):
            path = self.folder / "some" / "text.txt"
            path.write_text(text)
            self.make(path)
            self.assertEqual(self.documents()[0][0], text + "<end>")

    def test_marks_of_messages_are_obeyed_or_refused(self):
        def entry(role=1, **marks):
            messages = say("for", "BAD", "else", "GOOD")
            messages[role].update(marks)
            return {"messages": messages}
        obeyed = [entry(**mark) for mark in (
            {"weight": 0}, {"train": False}, {"masked": True}, {"trainable": False}, {"loss_mask": 0}, {"training": False},
            {"weight": 0.0, "train": None}, {"mask": 1})]
        for template in (PLAIN, MARKED):
            self.use_template(template)
            self.write_lines(*obeyed, entry(weight=1), entry(role=0, train=False), {**entry(), "weight": 1.0})
            self.make(self.lines)
            self.assertEqual([counted for _, counted in self.documents()],
                             ["GOOD<|im_end|>"] * len(obeyed) + ["BAD<|im_end|>GOOD<|im_end|>"] * 3)
        for refused, key in ((entry(weight=0.5), "weight"), (entry(weight="0"), '"weight": "0"; '), (entry(train_detail=[]), "train_detail"),
                             (entry(role=0, train=True), "train"), (entry(weight=0, train=True), "train"),
                             (entry(function_call={"name": "f"}), "function_call"), (entry(loss="no"), "loss"),
                             ({**entry(), "enable_thinking": False}, "enable_thinking"), ({**entry(), "weight": 2}, "weight"),
                             ({**entry(), "train_on_inputs": True}, "train_on_inputs"),
                             ({**entry(), "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
                             ({"prompt": "a", "completion": "b", "label": False}, "label"),
                             ({"messages": [dict(m, weight=0) for m in say("for", "x")]}, "message of the assistant")):
            self.write_lines(refused)
            self.make(self.lines, refused=True, says=["chats.jsonl:1: ", key])
        self.write_lines(obeyed[0])
        self.make(self.lines, "--count", "all", refused=True, says=["weight", "--count all"])
        self.use_template(PLAIN.replace("{{ message.content }}", "{{ message.content }}{{ mood }}"))
        self.write_lines({**entry(), "chat_template_kwargs": {"mood": " if"}, "id": 7}, {**entry(), "id": 8})
        self.make(self.lines, says=["not used: id (2 times)"])
        self.assertEqual(self.documents()[0][1], "BAD if<|im_end|>GOOD if<|im_end|>")

    def test_calls_of_tools_and_parts_are_as_templates_take_them(self):
        self.use_template("{% if tools %}{{ tools | tojson }}{% endif %}" + marked(CHATML)[1])
        tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
        conversation = [*say("for"), call({"a": {"b": 1}})]
        there = self.tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
        parts = [{"role": "user", "content": [{"type": "text", "text": "f"}, {"type": "text", "text": "or"}]},
                 conversation[1]]
        self.write_lines({"messages": conversation, "tools": tools}, {"messages": conversation, "tools": json.dumps(tools)},
                         {"messages": json.dumps([*say("for"), call('{"a": {"b": 1}}')]), "tools": tools},
                         {"messages": parts, "tools": tools}, {"messages": conversation, "tools": ""})
        self.make(self.lines)
        self.assertEqual([text for text, _ in self.documents()], [there] * 4 + [there[len(json.dumps(tools)):]])
        for bad, why in (([*say("for"), call("{")], "arguments of a call of message 2"), ([*say("for"), call("[")], "JSON"),
                         ([{"role": "user", "content": [{"type": "image"}]}, *say("a", "b")], "no text (image)")):
            self.write_lines({"messages": bad})
            self.make(self.lines, refused=True, says=[why])
        self.use_template(PLAIN)
        self.write_lines({"messages": conversation})
        self.make(self.lines, refused=True, says=["tool_calls", "does not write"])
        # A template for parts alone.
        self.use_template(PLAIN.replace("{{ message.content }}", "{% for p in message.content %}{{ p.text }}{% endfor %}"))
        self.write_lines({"messages": parts[:1] + say("", "x")[1:]}, {"messages": say("for", "x")})
        self.make(self.lines)
        self.assertEqual(*self.documents())
        self.assertEqual(self.documents()[0][1], "x<|im_end|>")

    def test_folders_of_data_sets(self):
        folder = self.folder / "set"
        for name, text in (("train.jsonl", json.dumps({"messages": say("for", "value")}) + "\n"),
                           ("README.md", "---\nlicense: mit\n---\n"), ("LICENSE", "all rights"),
                           (".gitattributes", "*.jsonl lfs"), (".git/HEAD", "ref"), (".git/index", "DIRC\0\xff"),
                           (".ipynb_checkpoints/train.jsonl", "{"), (".train.jsonl.swp", "b0"), ("train.jsonl~", "{"),
                           (".cache/huggingface/download/train.jsonl.metadata", "0123"), ("table.csv", "a,b\n"),
                           ("dataset_infos.json", '{"default": {"splits": {}}}'), ("picture.png", "\x89PNG\0"),
                           ("part/notes.txt", "if"), ("part/README.md", "else")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="latin-1")
        os.mkfifo(folder / "pipe")
        (folder / "part/again").symlink_to("..")
        (self.folder / "linked").mkdir()
        (self.folder / "linked/more.txt").write_text("index")
        (folder / "linked").symlink_to(self.folder / "linked")
        self.make(folder, says=["left out of folders: ", "LICENSE (about the folder)", ".git (hidden)",
                                       "and 3 more"])
        self.assertEqual([text for text, _ in self.documents()],
                         ["index<end>", "else<end>", "if<end>",
                          "<|im_start|>user\nfor<|im_end|>\n<|im_start|>assistant\nvalue<|im_end|>\n"])
        self.make(folder, "--suffix", ".md", says=["2 documents"])
        (folder / "gone.jsonl").symlink_to("nowhere")
        self.make(folder, refused=True, says=["gone.jsonl: it cannot be read"])
        (folder / "gone.jsonl").unlink()
        (folder / "part/notes.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        self.make(folder, refused=True, says=["notes.txt: ", "git lfs pull"])

    def test_truncation_and_padding_of_a_tokenizer_are_not_for_data(self):
        (self.folder / "index.txt").write_text("index " * 50)
        for option in ({"truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}},
                       {"padding": {"strategy": {"Fixed": 1024}, "direction": "Right", "pad_to_multiple_of": None,
                                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<end>"}}):
            path = self.model / "tokenizer.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | option))
            for tokenizer in (path, self.model):
                self.make(self.folder / "index.txt", tokenizer=tokenizer)
                self.assertEqual(self.documents()[0][0].replace("<end>", ""), "index " * 50)

    def test_strangers_templates_and_tokenizers_are_bounded(self):
        self.write_lines({"messages": say("for", "value")})
        few = ("--document-seconds", "1", "--document-mib", "256")
        for template, why in (
                ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "longer than 1 s"),
                ("{{ 'a' * 10000000000 }}", "more memory than 256 MiB"), ("{{ '%9999999999d' | format(1) }}", ""),
                ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "recursion")):
            self.use_template(template)
            told = self.make(self.lines, *few, refused=True, says=[why])
            self.assertRegex(told.splitlines()[-1], r"chats\.jsonl:1: .*Nothing was written")
        self.use_template(PLAIN)
        path = self.model / "tokenizer.json"
        held = json.loads(path.read_text())
        path.write_text(json.dumps(held | {"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4}}))
        # The processor's second would be over first on a busy machine.
        told = self.make(self.lines, "--document-mib", "256", refused=True, says=["too much memory"])
        self.assertRegex(told.splitlines()[-1], r"chats\.jsonl:1: .*Nothing was written")
        for text in ("[" * 100000, "{}", "version https://git-lfs.github.com/spec/v1\n"):
            path.write_text(text)
            told = self.make(self.lines, refused=True)
            self.assertRegex(told.splitlines()[-1], f"^the tokenizer {self.model}: ")
        path.write_text(json.dumps(held))
        with mock.patch.object(make_token_files, "DOCUMENT_BYTES_MAX", 1 << 20):
            documents = make_token_files.Documents(make_token_files.Tokenizer(self.model), "all", None)
            report = make_token_files.Report(skip=True)
            (self.folder / "large.txt").write_text("for " * 300000)
            made = make_token_files.made_documents(documents, [(self.folder / "large.txt", True)], None, report, [],
                                                   make_token_files.Bounds())
            self.assertEqual((list(made), report.bad), ([], 1))

    def test_a_token_file_is_used_again_only_for_what_it_was_made_of(self):
        self.lines = self.folder / "set/chats.jsonl"
        self.lines.parent.mkdir()

        def again(*words, makes, state="new", refused=False):
            told = self.make(*(words or (self.lines.parent,)), "--for-recipe", state, refused=refused)
            self.assertEqual("making tokens" in told, makes, told)
            return told
        self.write_lines({"messages": say("for", "value")})
        again(makes=True)
        again(makes=False)
        times = self.lines.stat()
        self.write_lines({"messages": say("for", "index")})  # of the same size, and as old
        os.utime(self.lines, ns=(times.st_atime_ns, times.st_mtime_ns))
        again(makes=True)
        self.assertEqual(self.documents()[0][1], "index<|im_end|>")
        os.utime(self.lines, (1e9, 1e9))
        again(makes=False)  # the contents decide
        record = json.loads((self.folder / "chats.sources.json").read_text())
        (self.folder / "chats.sources.json").write_text(json.dumps(record | {"versions": ["0.1", "4.0"]}))
        again(makes=True)
        (self.lines.parent / "a.txt").write_text("if")
        again(makes=True)
        again("--suffix", ".jsonl", self.lines.parent, makes=True)
        both = [self.lines, self.lines.parent / "a.txt"]
        again(*both, makes=True)
        again(*both[::-1], makes=True)
        self.use_template(PLAIN + " ")
        again(*both[::-1], makes=True)
        self.use_template(MARKED)
        again(makes=True)
        # A start that failed, of other data.
        kept = self.out.read_bytes()
        (self.folder / "b.jsonl").write_text("{")
        again(self.folder / "b.jsonl", makes=True, refused=True)
        again(makes=True)
        # The tokens of a run are never replaced.
        for change in (lambda: (self.lines.parent / "a.txt").write_text("else"), self.lines.unlink,
                       lambda: self.use_template(PLAIN)):
            again(makes=False, state="begun")
            change()
            told = again(makes=True, state="begun", refused=True)
            self.assertIn(f"naming {self.out} itself", told)
            self.assertEqual(self.out.read_bytes(), kept)
            self.use_template(MARKED)
            (self.lines.parent / "a.txt").write_text("if")
            self.write_lines({"messages": say("for", "index")})
        self.tokenizer.save_pretrained(self.folder / "moved")
        self.make(self.lines.parent, "--for-recipe", "begun", tokenizer=self.folder / "moved")
        (self.model / "tokenizer_config.json").write_text(
            json.dumps(json.loads((self.model / "tokenizer_config.json").read_text()) | {"x": 1}))
        again(makes=True, state="begun")  # makes the same tokens
        again(makes=False, state="begun")
        self.assertEqual(self.out.read_bytes(), kept)
        # A run of a version that kept no record, whose masks had the line break behind a turn's end.
        (self.folder / "chats.sources.json").unlink()
        self.use_template(MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
        again(makes=True, state="begun")
        again(makes=False, state="begun")
        self.assertEqual(self.out.read_bytes(), kept)
        # To start over, which may fail before the old state is deleted.
        self.use_template(MARKED)
        (self.lines.parent / "a.txt").write_text("else")
        again(makes=True, state="over")
        self.assertNotEqual(self.out.read_bytes(), kept)
        (self.lines.parent / "a.txt").write_text("if")
        again(makes=True, state="begun")
        self.assertEqual(self.out.read_bytes(), kept)
        # The data is gone.
        shutil.rmtree(self.lines.parent)
        again(makes=False, state="begun")
        again(makes=False, state="new", refused=True)
        told = again(self.folder / "none.jsonl", makes=False, state="begun", refused=True)
        self.assertIn("no such file or folder", told)

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
        for name, content, why in (("d.jsonl.gz", gzip.compress(b"if"), "compressed by gzip"),
                                   ("e.parquet", b"PAR1\x15\x04", "a Parquet table")):
            (self.folder / name).write_bytes(content)
            self.make(self.folder / name, refused=True, says=[f"{name}: it is {why}"])
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
        recipe = str(self.folder / "epochs.toml")
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
