#!/usr/bin/env python3
"""Turns texts into tokens and back with a model's tokenizer. Used by `smartinf generate` and `train`.

Usage: tokenize_text.py TOKENIZER_JSON < REQUESTS

REQUESTS is a JSON object on each line, and so is each answer:
  {"encode": TEXT}      {"tokens": [...]}: as transformers' tokenizer does, with the tokens that it puts in front
  {"chat": TEXT}        {"tokens": [...]}: what the folder's chat template makes of it as the user's words
  {"decode": [...]}     {"text": TEXT}: without the tokenizer's special tokens
An answer {"error": TEXT} says why there is none.
"""
import json
import os
import signal
import sys


def need(package, error):
    sys.exit(f"smartinf: {sys.executable} has no {package} ({error}). Install it ({sys.executable} -m pip install "
             f"{package}), or name another Python in the environment variable SMARTINF_PYTHON")


class Tokenizer:
    def __init__(self, path):
        try:
            import tokenizers
        except ImportError as error:
            need("tokenizers", error)
        self.folder = os.path.dirname(path) or "."
        try:
            self.of_file = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # tokenizers has no class of its own for it
            sys.exit(f"smartinf: {path} is no tokenizer.json: {error}")
        self.of_file.no_truncation()
        self.of_file.no_padding()
        self.of_model = None

    def encode(self, text):
        return {"tokens": self.of_file.encode(text).ids}

    def chat(self, text):
        if self.of_model is None:
            try:
                os.environ.setdefault("HF_HUB_OFFLINE", "1")
                import transformers
            except ImportError as error:
                need("transformers", error)
            self.of_model = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if self.of_model.chat_template is None:
            return {"error": f"the tokenizer in {self.folder} has no chat template"}
        text = self.of_model.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                                 add_generation_prompt=True)
        return {"tokens": self.of_file.encode(text, add_special_tokens=False).ids}

    def decode(self, tokens):
        return {"text": self.of_file.decode(tokens, skip_special_tokens=True)}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks says when it ends
    tokenizer = Tokenizer(sys.argv[1])
    for line in sys.stdin:
        [(what, value)] = json.loads(line).items()
        try:
            answer = {"encode": tokenizer.encode, "chat": tokenizer.chat, "decode": tokenizer.decode}[what](value)
        except Exception as error:  # of a tokenizer or a template, which raise what they like
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
