#!/usr/bin/env python3
"""Turns text and conversations into token files that smartinf trains on (docs/data.md).

Examples:
  # Documents with borders, for fine-tuning: conversations of which the assistant's words count.
  scripts/make_token_files.py --tokenizer models/mine --out chat.safetensors chats.jsonl
  # A stream of tokens, for training from nothing (llm.c's .bin form).
  scripts/make_token_files.py --tokenizer tokenizer.json --out data/ books/*.txt
  smartinf train RECIPE --data.paths chat.safetensors --model.vocabulary 32000

--out FILE.safetensors makes one file of documents, any other --out is a folder for .bin files.

A file whose name ends in .jsonl has a document on each line, one of
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
  {"prompt": "...", "completion": "..."}      the completion counts; both may be lists of messages
  {"text": "..."}                             all of it counts
Every other file is one document (or several, see --split-at), and a folder stands for all files in it, in
the order of their names. The last line says the vocabulary that the model needs.
"""
import argparse
import array
import json
import os
import pathlib
import re
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tokenizers come from folders

HEADER_INTS = 256
# Magic and version of .bin files with 16-bit and with 32-bit tokens.
NARROW = (20240520, 1, "<u2")
WIDE = (20240801, 7, "<u4")
BAD_LINES_SHOWN = 10


class BadInput(Exception):
    """A document that cannot be used; the message says why."""


class Tokenizer:
    """A tokenizer.json, or a folder with the tokenizer of a model."""

    def __init__(self, path):
        self.name = str(path)
        self.folder = path.is_dir()
        if self.folder:
            import transformers
            self.of_model = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
            if not self.of_model.is_fast:
                sys.exit(f"--tokenizer: {path} has no tokenizer.json, which says where in the text a token is")
            self.numbers = self.of_model.get_vocab()
            self.end = self.of_model.eos_token_id
        else:
            import tokenizers
            self.of_file = tokenizers.Tokenizer.from_file(str(path))
            self.numbers = self.of_file.get_vocab(with_added_tokens=True)
            self.end = None
        self.vocabulary = max(self.numbers.values()) + 1

    def encode(self, text, add_special_tokens):
        """Tokens, and the range of characters of each."""
        try:
            if self.folder:
                made = self.of_model(text, add_special_tokens=add_special_tokens,
                                     return_offsets_mapping=True, verbose=False)
                return made["input_ids"], made["offset_mapping"]
            made = self.of_file.encode(text, add_special_tokens=add_special_tokens)
            return made.ids, made.offsets
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair
            raise BadInput(f"the tokenizer refuses its text: {error}") from error

    def check_chat_template(self):
        if not self.folder:
            raise BadInput("messages need the tokenizer's folder, with its chat template: --tokenizer FOLDER")
        if self.of_model.chat_template is None:
            raise BadInput(f"the tokenizer in {self.name} has no chat template")

    def render(self, messages, **options):
        try:
            return self.of_model.apply_chat_template(messages, **options)
        except Exception as error:  # a template raises what it likes
            raise BadInput(f"the chat template refuses it: {error}") from error


def marks_generation(template):
    texts = template.values() if isinstance(template, dict) else [template]
    return any(re.search(r"\{%-?\s*generation\b", text) for text in texts)


class Documents:
    """Makes documents, each a list of tokens and one of zeros and ones: which of them count."""

    def __init__(self, tokenizer, count, end):
        self.tokenizer = tokenizer
        self.count = count
        self.end = end  # token behind each text; None: none

    def of_text(self, text, counted_from=0):
        tokens, places = self.tokenizer.encode(text, add_special_tokens=self.tokenizer.folder)
        if not tokens:
            raise BadInput("it is empty")
        first = 0 if self.count == "all" else counted_from
        mask = [int(first == 0 or end > first) for _, end in places]
        if self.end is not None and tokens[-1:] != [self.end]:
            return tokens + [self.end], mask + [1]
        return tokens, mask[:-1] + [1]

    def of_messages(self, messages, counted_from=0, tools=None):
        """counted_from: the message from which on the assistant's words count."""
        tokenizer = self.tokenizer
        tokenizer.check_chat_template()
        if self.count == "all":
            text = tokenizer.render(messages, tools=tools, tokenize=False)
            tokens, _ = tokenizer.encode(text, add_special_tokens=False)
            return tokens, [1] * len(tokens)
        wanted = [i for i, message in enumerate(messages)
                  if i >= counted_from and message["role"] == "assistant"]
        if not wanted:
            raise BadInput("there is no message of the assistant (--count all counts all messages)")
        if counted_from == 0 and marks_generation(tokenizer.of_model.chat_template):
            made = tokenizer.render(messages, tools=tools, tokenize=True, return_dict=True,
                                    return_assistant_tokens_mask=True)
            return made["input_ids"], made["assistant_masks"]
        text = tokenizer.render(messages, tools=tools, tokenize=False)
        ranges = [self.range_of(messages, i, text, tools) for i in wanted]
        tokens, places = tokenizer.encode(text, add_special_tokens=False)
        return tokens, [int(any(begin < to and end > at for at, to in ranges)) for begin, end in places]

    def range_of(self, messages, index, text, tools):
        """Where a message of the assistant stands in the text: between what the template makes of the
        messages before it, up to where the model is to speak, and of those up to it."""
        before = self.tokenizer.render(messages[:index], tools=tools, tokenize=False,
                                       add_generation_prompt=True)
        behind = self.tokenizer.render(messages[:index + 1], tools=tools, tokenize=False)
        if not (behind.startswith(before) and text.startswith(behind)):
            raise BadInput("the chat template writes the beginning of a conversation otherwise when it goes on, "
                           f"so that the words of message {index + 1} cannot be told apart; use --count all, or a "
                           "template with {% generation %}")
        return len(before), len(behind)

    def of_line(self, line):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise BadInput("not a JSON object")
        tools = entry.get("tools")
        if "messages" in entry:
            return self.of_messages(checked_messages(entry["messages"], "messages"), tools=tools)
        if "prompt" in entry and "completion" in entry:
            prompt, completion = entry["prompt"], entry["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                if not completion:
                    raise BadInput("the completion is empty")
                return self.of_text(prompt + completion, counted_from=len(prompt))
            prompt = checked_messages(prompt, "prompt")
            return self.of_messages(prompt + checked_messages(completion, "completion"),
                                    counted_from=len(prompt), tools=tools)
        if isinstance(entry.get("text"), str):
            return self.of_text(entry["text"])
        raise BadInput('neither "messages" nor "prompt" and "completion" nor "text" is in it')


def checked_messages(messages, key):
    if not isinstance(messages, list) or not messages:
        raise BadInput(f"{key} is not a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadInput(f"message {number} of {key} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise BadInput(f"message {number} of {key} has no content that is text")
    return messages


def input_files(paths, suffixes):
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file() and (not suffixes or p.suffix in suffixes))
        elif path.is_file():
            yield path
        else:
            sys.exit(f"{path}: no such file or folder")


def texts_of(path, split_at):
    """Each document of a text file, with its place for messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"no UTF-8 text: {error}") from error
    line = 1
    for part in [text] if split_at is None else text.split(split_at):
        if part.strip():
            yield f"{path}:{line}", part
        line += part.count("\n") + (split_at or "").count("\n")


def lines_of(path):
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            yield f"{path}:{number}", line


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self):
        self.shown = time.monotonic()

    def show(self, documents, tokens, last=False):
        now = time.monotonic()
        if now - self.shown < 2 and not last:
            return
        self.shown = now
        print(f"{documents} documents, {tokens / 1e6:.2f} million tokens", file=sys.stderr, flush=True)


class BadDocuments:
    """What could not be used. Without --skip-bad the first one ends the program."""

    def __init__(self, skip):
        self.skip = skip
        self.count = 0

    def add(self, place, why):
        self.count += 1
        if not self.skip:
            sys.exit(f"{place}: {why}\nNothing was written. Mend it, or leave out what is bad with --skip-bad.")
        if self.count <= BAD_LINES_SHOWN:
            print(f"{place}: left out: {why}", file=sys.stderr)

    def report(self):
        if self.count > BAD_LINES_SHOWN:
            print(f"and {self.count - BAD_LINES_SHOWN} more", file=sys.stderr)
        if self.count > 0:
            print(f"{self.count} bad documents were left out")


def made_documents(documents, files, split_at, bad):
    """Tokens and mask of each document; what is bad goes to `bad`."""
    for path in files:
        of_lines = path.suffix == ".jsonl"
        places = lines_of(path) if of_lines else texts_of(path, split_at)
        while True:
            place = str(path)
            try:
                place, content = next(places)
                tokens, mask = documents.of_line(content) if of_lines else documents.of_text(content)
                if of_lines and 1 not in mask[1:]:
                    raise BadInput("no token counts as a target")
            except StopIteration:
                break
            except BadInput as error:
                bad.add(place, error)
            else:
                yield tokens, mask


def replace(path, write):
    """Either all of it is there under its name, or nothing."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.rename(path)
    except OSError as error:
        sys.exit(f"{path}: cannot be written: {error}")
    finally:
        partial.unlink(missing_ok=True)


def write_bin(path, tokens, wide):
    import numpy
    magic, version, kind = WIDE if wide else NARROW
    header = numpy.zeros(HEADER_INTS, "<i4")
    header[:3] = magic, version, len(tokens)
    replace(path, lambda partial: partial.write_bytes(header.tobytes() + numpy.asarray(tokens, kind).tobytes()))
    print(f"{path}: {len(tokens)} tokens")


def make_stream(made, folder, vocabulary, tokens_per_file):
    folder.mkdir(parents=True, exist_ok=True)
    tokens, files, documents, progress = [], 0, 0, Progress()
    for added, _ in made:
        tokens += added
        documents += 1
        progress.show(documents, files * tokens_per_file + len(tokens))
        while len(tokens) >= tokens_per_file:
            write_bin(folder / f"tokens_{files:03}.bin", tokens[:tokens_per_file], vocabulary > 2**16)
            del tokens[:tokens_per_file]
            files += 1
    if tokens:
        write_bin(folder / f"tokens_{files:03}.bin", tokens, vocabulary > 2**16)
        files += 1
    return files > 0


def make_documents(made, path, tokenizer, end, count):
    import numpy
    import safetensors.numpy
    tokens = array.array("I" if tokenizer.vocabulary > 2**16 else "H")
    mask, starts, largest, progress = bytearray(), array.array("Q"), 0, Progress()
    for added, counted in made:
        starts.append(len(tokens))
        largest = max(largest, max(added))
        tokens.extend(added)
        mask.extend(counted)
        progress.show(len(starts), len(tokens))
    if not starts:
        return False
    tensors = {"tokens": numpy.asarray(tokens), "document_starts": numpy.asarray(starts)}
    counted = sum(mask)
    if counted < len(mask):
        tensors["loss_mask"] = numpy.frombuffer(mask, numpy.uint8)
    metadata = {"token_file": "1", "vocabulary": str(largest + 1), "tokenizer": tokenizer.name,
                "count": count}
    if end is not None:
        metadata["eos_token_id"] = str(end)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda partial: safetensors.numpy.save_file(tensors, partial, metadata))
    print(f"{path}: {len(starts)} documents, {len(tokens)} tokens, {100 * counted / len(tokens):.1f} % of them count")
    return True


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="text files, .jsonl files, or folders of them")
    parser.add_argument("--tokenizer", required=True, type=pathlib.Path,
                        help="a model's folder, or a tokenizer.json of Hugging Face's tokenizers")
    parser.add_argument("--out", required=True, type=pathlib.Path,
                        help="FILE.safetensors for documents with borders, or a folder for .bin files")
    parser.add_argument("--count", choices=("assistant", "all"), default="assistant",
                        help="what counts in the loss: the assistant's words and completions, or all "
                             "(default: %(default)s)")
    parser.add_argument("--separator", metavar="TOKEN",
                        help="token behind each text, e.g. '<|endoftext|>'; default: the end token of a "
                             "tokenizer's folder, if there is one, for .safetensors")
    parser.add_argument("--split-at", metavar="TEXT",
                        help="what stands between the documents of a text file, e.g. '\\n\\n\\n'")
    parser.add_argument("--suffix", action="append", default=[],
                        help="of the files that are taken from folders, e.g. .txt; may be repeated (default: all)")
    parser.add_argument("--skip-bad", action="store_true",
                        help="leave out documents that cannot be used, and count them")
    parser.add_argument("--tokens-per-file", type=int, default=100_000_000,
                        help="largest .bin file (default: %(default)s)")
    arguments = parser.parse_args()
    if not 0 < arguments.tokens_per_file < 2**31:
        parser.error("--tokens-per-file must be from 1 to 2147483647, what a header can hold")
    if arguments.split_at is not None:
        arguments.split_at = arguments.split_at.replace("\\n", "\n")
        if not arguments.split_at:
            parser.error("--split-at is empty")
    return arguments


def main():
    arguments = parse_arguments()
    if not arguments.tokenizer.exists():
        sys.exit(f"--tokenizer: no file or folder {arguments.tokenizer}")
    with_documents = arguments.out.suffix == ".safetensors"
    try:
        tokenizer = Tokenizer(arguments.tokenizer)
        import numpy  # noqa: F401
        import safetensors.numpy  # noqa: F401
    except ImportError as missing:
        sys.exit(f"{missing}. Install what token files are made with ({sys.executable} -m pip install tokenizers "
                 "transformers numpy safetensors); smartinf takes another Python from the environment variable "
                 "SMARTINF_PYTHON")
    except (OSError, ValueError) as error:
        sys.exit(f"--tokenizer: {arguments.tokenizer}: {error}")
    end = tokenizer.end if with_documents else None
    if arguments.separator is not None:
        end = tokenizer.numbers.get(arguments.separator)
        if end is None:
            sys.exit(f"--separator: the tokenizer has no token {arguments.separator!r}")
    bad = BadDocuments(arguments.skip_bad)
    count = arguments.count if with_documents else "all"  # .bin files have no mask
    made = made_documents(Documents(tokenizer, count, end), input_files(arguments.inputs, arguments.suffix),
                          arguments.split_at, bad)
    if with_documents:
        any_made = make_documents(made, arguments.out, tokenizer, end, count)
    else:
        any_made = make_stream(made, arguments.out, tokenizer.vocabulary, arguments.tokens_per_file)
    bad.report()
    if not any_made:
        sys.exit("no document found")
    print(f"model.vocabulary = {tokenizer.vocabulary}")


if __name__ == "__main__":
    main()
