#!/usr/bin/env python3
"""Turns text and conversations into token files that smartinf trains on (docs/data.md).

Examples:
  # Documents with borders, for fine-tuning: conversations of which the assistant's words count.
  scripts/make_token_files.py --tokenizer models/mine --out chat.safetensors chats.jsonl
  # A stream of tokens, for training from nothing (llm.c's .bin form).
  scripts/make_token_files.py --tokenizer tokenizer.json --out data/ books/*.txt
  smartinf train RECIPE --data.paths chat.safetensors --model.vocabulary 32000

--out FILE.safetensors makes one file of documents, any other --out is a folder for .bin files.

A file of JSON (.jsonl: one value on each line; .json and others by what is in them: one value, a list of them, or
several) holds documents, each one of
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
  {"prompt": "...", "completion": "..."}      the completion counts; both may be lists of messages
  {"text": "..."}                             all of it counts
Every other file is one document (or several, see --split-at), and a folder stands for all files in it, in
the order of their names. The last line says the vocabulary that the model needs.
"""
import argparse
import array
import hashlib
import importlib.metadata
import json
import os
import pathlib
import sys
import time

from bounded_tokenizer import DOCUMENT_BYTES_MAX, DOCUMENT_MIB, DOCUMENT_SECONDS, LOADING, BadInput, Bounds, Tokenizer
from conversations import Documents
from data_files import LeftOut, Refused, contents_of, found_files

HEADER_INTS = 256
# Magic and version of .bin files with 16-bit and with 32-bit tokens.
NARROW = (20240520, 1, "<u2")
WIDE = (20240801, 7, "<u4")
SHOWN_MAX = 10
# Of what becomes which tokens: files that were made by other rules are not used again.
RULES = 2

def say(text, file=None):
    """Names of files and keys may come from strangers: a terminal must not obey them."""
    print("".join(c if c.isprintable() or c == "\n" else "?" for c in text), file=file or sys.stdout, flush=True)


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self):
        self.shown = time.monotonic()

    def show(self, documents, tokens):
        now = time.monotonic()
        if now - self.shown < 2:
            return
        self.shown = now
        print(f"{documents} documents, {tokens / 1e6:.2f} million tokens", file=sys.stderr, flush=True)


class Report:
    """What could not be used, and what was left out. Without --skip-bad the first bad document ends the program."""

    def __init__(self, skip):
        self.skip = skip
        self.bad = 0

    def add_bad(self, place, why, advice="bad"):
        self.bad += 1
        if not self.skip:
            raise Refused(f"{place}: {why}. Nothing was written. {ADVICE[advice]}")
        if self.bad <= SHOWN_MAX:
            say(f"{place}: left out: {why}", sys.stderr)

    def show(self, left_out, unused):
        if self.bad > SHOWN_MAX:
            print(f"and {self.bad - SHOWN_MAX} more", file=sys.stderr)
        if self.bad > 0:
            print(f"{self.bad} bad documents were left out")
        if left_out:
            shown = ", ".join(f"{path} ({why})" for path, why in sorted(left_out)[:SHOWN_MAX])
            more = f" and {len(left_out) - SHOWN_MAX} more" if len(left_out) > SHOWN_MAX else ""
            say(f"left out of folders: {shown}{more}", sys.stderr)
        used_not = [f"{key} ({count} times)" for key, count in sorted(unused.items()) if count > 0]
        if used_not:
            more = " ..." if len(used_not) > SHOWN_MAX else ""
            say(f"not used: {', '.join(used_not[:SHOWN_MAX])}{more}", sys.stderr)


def made_documents(documents, files, split_at, report, left_out, bounds):
    """Tokens and mask of each document; what is bad goes to `report`."""
    for path, named in files:
        contents = contents_of(path, named, split_at, bounds)
        while True:
            place = str(path)
            try:
                place, size, content = next(contents)
                if size > DOCUMENT_BYTES_MAX:
                    raise BadInput(f"a document of {size >> 20} MiB; the most is {DOCUMENT_BYTES_MAX >> 20} MiB",
                                   advice="too large")
                with bounds.over(place, size):
                    tokens, mask = made_document(documents, content)
            except StopIteration:
                break
            except LeftOut as why:
                left_out.append((path, str(why)))
            except BadInput as error:
                report.add_bad(place, error, error.advice)
            except OSError as error:
                report.add_bad(place, f"it cannot be read: {error.strerror}")
            else:
                yield tokens, mask


def made_document(documents, content):
    if isinstance(content, str):
        return documents.of_text(content)
    if isinstance(content, bytes):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"not JSON: {error}") from None
    tokens, mask = documents.of_entry(content)
    if 1 not in mask[1:]:
        raise BadInput("no token counts as a target")
    return tokens, mask


def replace(path, write):
    """Either all of it is there under its name, or nothing."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.rename(path)
    except OSError as error:
        raise Refused(f"{path}: cannot be written: {error}") from None
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


def make_documents(made, path, tokenizer, end, count, before):
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
    if before is not None:
        before.check(tensors)
        return True
    metadata = {"token_file": "1", "vocabulary": str(largest + 1), "tokenizer": tokenizer.name,
                "count": count}
    if end is not None:
        metadata["eos_token_id"] = str(end)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, lambda partial: safetensors.numpy.save_file(tensors, partial, metadata))
    print(f"{path}: {len(starts)} documents, {len(tokens)} tokens, {100 * counted / len(tokens):.1f} % of them count")
    return True


class Sources:
    """What a token file was made of, kept in a file beside it: it is used again only for the same.

    What was seen of the files (sizes, times, places on the drive; the kernel's time of change cannot be set) saves
    reading them; where that is different, their contents decide."""

    def __init__(self, arguments, files, kept_tokens):
        self.path = arguments.out.with_name(arguments.out.stem + ".sources.json")
        self.tokens = arguments.out
        self.files = files
        self.options = [RULES, arguments.count, arguments.separator, arguments.split_at]
        self.paths = [os.path.abspath(path) for path in arguments.inputs]
        folder = arguments.tokenizer
        parts = [folder] if folder.is_file() else sorted(
            path for pattern in ("*", "additional_chat_templates/*") for path in folder.glob(pattern)
            if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model")
            and path.name != "generation_config.json" and not path.name.endswith(".index.json"))
        self.of_tokenizer = [(path, path.name if folder.is_dir() else "") for path in parts]
        self.kept = self.read() if kept_tokens else {}
        self.rules = RULES  # of the tokens
        self.versions = [version_of(name) for name in ("tokenizers", "transformers")]

    def read(self):
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            return kept if isinstance(kept, dict) else {}
        except (OSError, ValueError):
            return {}

    def seen(self):
        places = []
        for path in [path for path, _ in self.of_tokenizer] + [path for path, _ in self.files]:
            stat = path.stat()
            places.append([os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
        return digest_of([self.options, places])

    def made_from(self):
        def contents(path):
            with open(path, "rb") as file:
                return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
        return digest_of([self.options, [[name, contents(path)] for path, name in self.of_tokenizer],
                          [[path.name, named, contents(path)] for path, named in self.files]])

    def same(self):
        """The token file was made of this."""
        if not self.kept or (None not in self.versions and self.versions != self.kept.get("versions")):
            return False
        if self.kept.get("seen") == self.seen():
            return True
        return self.kept.get("made_from") == self.made_from()

    def forget(self):
        self.path.unlink(missing_ok=True)

    def keep(self):
        record = {"paths": self.paths, "rules": self.rules, "versions": self.versions, "seen": self.seen(),
                  "made_from": self.made_from()}
        replace(self.path, lambda partial: partial.write_text(json.dumps(record) + "\n", encoding="utf-8"))


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_of(value):
    return hashlib.blake2b(json.dumps(value).encode()).hexdigest()


class Before:
    """The token file that a run was started with. By other rules its masks may be others."""

    def __init__(self, sources):
        self.path = sources.tokens
        self.set_aside = set_aside(self.path)
        sources.rules = sources.kept.get("rules", 1)
        self.with_mask = sources.rules == RULES

    def check(self, tensors):
        if self.holds(self.path, tensors):
            return
        # A start that was to delete the run's state has ended before it did.
        if not (self.set_aside.exists() and self.holds(self.set_aside, tensors)):
            raise Refused(f"what is named, or the tokenizer, makes other tokens than {self.path} has, with which the "
                          f"run was started. {ADVICE['resumed'].format(self.path)}")
        self.set_aside.replace(self.path)

    def holds(self, path, tensors):
        import numpy
        import safetensors.numpy
        held = safetensors.numpy.load_file(path)
        names = held.keys() | tensors.keys()
        if not self.with_mask:
            names -= {"loss_mask"}
        return all(name in held and name in tensors and numpy.array_equal(held[name], tensors[name]) for name in names)


def set_aside(path):
    return path.with_name(path.stem + ".before" + path.suffix)


# What a user can do who has this program's options, and one who has a recipe's keys.
OF_PROGRAM = {
    "bad": "Mend it, or leave out what is bad with --skip-bad",
    "template": "Mend it, or leave out what is bad with --skip-bad",
    "untold": "Use a template with {% generation %}, or --count all, or leave out what is bad with --skip-bad",
    "none counts": "Mend it, or say that all messages count with --count all, or leave out what is bad with --skip-bad",
    "all counts": "Make a .safetensors file without --count all, or take the key away",
    "too large": "Say with --split-at what separates the documents of a text, or leave it out with --skip-bad",
}
BY_HAND = "make a token file with scripts/make_token_files.py and name that (docs/data.md)"
OF_RECIPE = dict.fromkeys(OF_PROGRAM, f"Mend it, or {BY_HAND}; that program can leave out what is bad") | {
    "untold": f"Use a template with {{% generation %}}, or {BY_HAND}; that program can let all tokens count",
    "too large": "Divide it into several files",
    "resumed": "Name what the run was started with; or go on with the tokens that are there, by naming {} itself; or "
               "choose another train.run",
}
ADVICE = OF_PROGRAM


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="text files, files of JSON, or folders of them")
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
    parser.add_argument("--document-seconds", type=float, default=DOCUMENT_SECONDS,
                        help="the processor's time that a small document may take (default: %(default)s)")
    parser.add_argument("--document-mib", type=int, default=DOCUMENT_MIB,
                        help="memory that a small document may take, in MiB (default: %(default)s)")
    # For smartinf train: a file of the same sources is used again; that of a run that has begun is never replaced, and
    # kept beside the new one where the run is to start over.
    parser.add_argument("--for-recipe", choices=("new", "over", "begun"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not 0 < arguments.tokens_per_file < 2**31:
        parser.error("--tokens-per-file must be from 1 to 2147483647, what a header can hold")
    if not (0 < arguments.document_seconds < 1e6 and 0 < arguments.document_mib < 2**30):
        parser.error("--document-seconds and --document-mib must be above 0")
    if arguments.split_at is not None:
        arguments.split_at = arguments.split_at.replace("\\n", "\n")
        if not arguments.split_at:
            parser.error("--split-at is empty")
    return arguments


def load_tokenizer(path, bounds):
    try:
        import numpy  # noqa: F401
        import safetensors.numpy  # noqa: F401
        with bounds.over(f"the tokenizer {path}", times=LOADING):
            return Tokenizer(path)
    except ImportError as missing:
        raise Refused(f"{missing}. Install what token files are made with ({sys.executable} -m pip install tokenizers "
                      "transformers numpy safetensors jinja2); smartinf takes another Python from the environment "
                      "variable SMARTINF_PYTHON") from None
    except BadInput as error:
        raise Refused(f"the tokenizer {path}: {error}") from None


def kept_without_sources(arguments):
    """Of a run that has begun, where what its tokens were made of is no longer there."""
    missing = [path for path in arguments.inputs if not os.path.exists(path)]
    if not missing or arguments.for_recipe != "begun" or not arguments.out.exists():
        return False
    sources = Sources(arguments, [], True)
    if sources.kept.get("paths") != sources.paths:
        raise Refused(f"no such file or folder: {missing[0]}. {ADVICE['resumed'].format(arguments.out)}")
    say(f"{', '.join(missing)}: no longer there; {arguments.out}, which was made of it, is used", sys.stderr)
    return True


def make(arguments, bounds):
    if kept_without_sources(arguments):
        return
    if not arguments.tokenizer.exists():
        raise Refused(f"--tokenizer: no file or folder {arguments.tokenizer}")
    files, left_out = found_files(arguments.inputs, arguments.suffix)
    there = arguments.for_recipe is not None and arguments.out.exists()
    sources = Sources(arguments, files, there) if arguments.for_recipe else None
    if there and sources.same():
        return
    say(f"making tokens of {len(files)} file{'' if len(files) == 1 else 's'}: {', '.join(arguments.inputs)}")
    before = Before(sources) if there and arguments.for_recipe == "begun" else None
    if sources and not before:
        sources.forget()
        if there and arguments.for_recipe == "over" and not set_aside(arguments.out).exists():
            arguments.out.rename(set_aside(arguments.out))
    seen = sources.seen() if sources else None
    with_documents = arguments.out.suffix == ".safetensors"
    tokenizer = load_tokenizer(arguments.tokenizer, bounds)
    end = tokenizer.end if with_documents else None
    if arguments.separator is not None:
        end = tokenizer.numbers.get(arguments.separator)
        if end is None:
            raise Refused(f"--separator: the tokenizer has no token {arguments.separator!r}")
    report = Report(arguments.skip_bad)
    count = arguments.count if with_documents else "all"  # .bin files have no mask
    documents = Documents(tokenizer, count, end)
    made = made_documents(documents, files, arguments.split_at, report, left_out, bounds)
    if with_documents:
        any_made = make_documents(made, arguments.out, tokenizer, end, count, before)
    else:
        any_made = make_stream(made, arguments.out, tokenizer.vocabulary, arguments.tokens_per_file)
    report.show(left_out, documents.unused)
    if not any_made:
        raise Refused("no document found")
    if sources is None:
        print(f"model.vocabulary = {tokenizer.vocabulary}")
        return
    if sources.seen() != seen:
        raise Refused(f"{', '.join(arguments.inputs)}: changed while tokens were made of it. Start again")
    sources.keep()


def say_why(arguments, why):
    """Where smartinf asked, it says so with its own words around it."""
    if arguments.for_recipe:
        say("error: " + " ".join(why.split("\n")))
    else:
        say(why, sys.stderr)
    return 1


def main():
    global ADVICE
    arguments = parse_arguments()
    if arguments.for_recipe:
        ADVICE = OF_RECIPE
    bounds = Bounds(arguments.document_seconds, arguments.document_mib)

    def work():
        try:
            make(arguments, bounds)
            return 0
        except Refused as error:
            return say_why(arguments, str(error))
        except OSError as error:
            return say_why(arguments, str(error))
        except BadInput as error:
            return say_why(arguments, f"{error}. {ADVICE['bad']}")
        except Exception as error:
            return say_why(arguments, f"{type(error).__name__}: {error}. This is a fault of make_token_files.py")

    code, why = bounds.run(work, asked=arguments.for_recipe is not None)
    if why is not None:
        code = say_why(arguments, f"{why}. Nothing was written. {ADVICE['bad']}")
    sys.exit(code)


if __name__ == "__main__":
    main()
