#!/usr/bin/env python3
"""Turns texts into tokens and back with a model's tokenizer. Used by `smartinf generate` and `train`.

Usage: tokenize_text.py TOKENIZER < REQUESTS

TOKENIZER is a model's folder, or a tokenizer.json. REQUESTS is a JSON object on each line, and so is each answer:
  {"encode": TEXT}      {"tokens": [...]}: as transformers' tokenizer does, with the tokens that it puts in front
  {"chat": TEXT}        {"tokens": [...]}: what the folder's chat template makes of it as the user's words
  {"chat": [...]}       the same of a list of messages
  {"decode": [...]}     {"text": TEXT}: without the tokenizer's special tokens
An answer {"error": TEXT} says why there is none; with "ended": true there will be none any more.
"""
import json
import signal
import sys

from bounded_tokenizer import LOADING, BadInput, Bounds, Tokenizer


class Answers:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text):
        return {"tokens": self.tokenizer.encode(text, add_special_tokens=True)[0]}

    def chat(self, words):
        self.tokenizer.chat_template()
        messages = words if isinstance(words, list) else [{"role": "user", "content": words}]
        text = self.tokenizer.render(messages, add_generation_prompt=True)
        return {"tokens": self.tokenizer.encode(text, add_special_tokens=False)[0]}

    def decode(self, tokens):
        return {"text": self.tokenizer.of_file.decode(tokens, skip_special_tokens=True)}


def fail(why):
    print(json.dumps({"error": why, "ended": True}), flush=True)
    return 1


def answer_all(path, bounds):
    try:
        with bounds.over(path, times=LOADING):
            answers = Answers(Tokenizer(path))
    except ImportError as error:
        package = error.name or "tokenizers"
        return fail(f"{sys.executable} has no {package} ({error}). Install it ({sys.executable} -m pip "
                    f"install {package}), or name another Python in the environment variable SMARTINF_PYTHON")
    except BadInput as error:
        return fail(f"{path}: {error}")
    for line in sys.stdin:
        [(what, value)] = json.loads(line).items()
        try:
            with bounds.over("the text", len(line)):
                answer = {"encode": answers.encode, "chat": answers.chat, "decode": answers.decode}[what](value)
        except BadInput as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    return 0


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks says when it ends
    bounds = Bounds()
    code, why = bounds.run(lambda: answer_all(sys.argv[1], bounds), asked=True)
    sys.exit(code if why is None else fail(why))


if __name__ == "__main__":
    main()
