"""A model's tokenizer and chat template, which may be a stranger's: in a process with bounds on its time and memory.

Used by make_token_files.py and tokenize_text.py; where these are compiled into smartinf, this text stands in place of
its import.
"""
import contextlib
import ctypes
import functools
import mmap
import os
import pathlib
import re
import resource
import signal
import struct
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"  # tokenizers come from folders
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say that it has no torch
os.environ["RUST_BACKTRACE"] = "0"  # a stack's text takes longer than a document may
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads take address space, and documents go one by one

DOCUMENT_SECONDS = 20
DOCUMENT_MIB = 1024
# Added for the size of a document.
SECONDS_PER_MIB = 10
BYTES_PER_BYTE = 128
DOCUMENT_BYTES_MAX = 64 << 20
# A tokenizer of 260 thousand words takes some seconds and 1 GiB.
LOADING = 4


class BadInput(Exception):
    """What cannot be used; the message says why. advice: what can be done about it, by a name."""

    def __init__(self, why, advice="bad"):
        super().__init__(why)
        self.advice = advice


class Bounds:
    """What is made between with-statements may take so much of the processor's time and of memory.

    The work runs in a process of its own: what a tokenizer does in native code can only be stopped together with the
    process that does it, and ends it when there is no memory."""

    # The processor's seconds at which it is over, 0: never; how many it may take; bytes of the place.
    SHARED = struct.Struct("=ddH")

    def __init__(self, seconds=DOCUMENT_SECONDS, mib=DOCUMENT_MIB):
        self.seconds = seconds
        self.bytes = mib << 20
        self.shared = mmap.mmap(-1, 4096)  # with the parent
        self.hard = resource.getrlimit(resource.RLIMIT_AS)[1]

    @contextlib.contextmanager
    def over(self, place, size=0, times=1):
        """size: bytes of what is worked on."""
        seconds = times * self.seconds + size / 2**20 * SECONDS_PER_MIB
        memory = times * self.bytes + size * BYTES_PER_BYTE
        name = str(place).encode(errors="replace")[:4000]
        self.SHARED.pack_into(self.shared, 0, time.process_time() + seconds, seconds, len(name))
        self.shared[self.SHARED.size:self.SHARED.size + len(name)] = name
        with open("/proc/self/statm", "rb") as statm:
            used = int(statm.read().split()[0]) * mmap.PAGESIZE
        limit = used + memory if self.hard == resource.RLIM_INFINITY else min(used + memory, self.hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, self.hard))
        try:
            yield
        except MemoryError:
            raise BadInput(f"it takes more memory than {memory >> 20} MiB") from None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (self.hard, self.hard))
            self.SHARED.pack_into(self.shared, 0, 0.0, 0.0, 0)

    def under_way(self):
        over_at, seconds, size = self.SHARED.unpack_from(self.shared)
        return over_at, seconds, self.shared[self.SHARED.size:self.SHARED.size + size].decode(errors="replace")

    def run(self, work, asked=False):
        """The exit code of work(), and why it was ended (where it was). asked: it ends with the process that has
        started this one."""
        sys.stdout.flush()
        sys.stderr.flush()
        who_asks, parent = os.getppid(), os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if os.getppid() == parent:
                    code = work()
                sys.stdout.flush()
            except KeyboardInterrupt:
                code = 130
            except BrokenPipeError:
                pass
            finally:
                os._exit(code)
        why = None
        while True:
            try:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                over_at, seconds, place = self.under_way()
                if over_at and processor_seconds(child) > over_at:
                    why = f"{place}: it takes longer than {seconds:.3g} s of the processor"
                    os.kill(child, signal.SIGKILL)
                if asked and os.getppid() != who_asks:
                    os.kill(child, signal.SIGKILL)
                signal.sigtimedwait([signal.SIGCHLD], 0.25)
            except KeyboardInterrupt:  # the child has it, too
                pass
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status), None
        if why is None:
            place = self.under_way()[2] or "making tokens"
            number = os.WTERMSIG(status)
            why = (f"{place}: the tokenizer was ended by signal {number} ({signal.strsignal(number)}): it takes too "
                   "much memory, or has a fault")
        return 1, why


def processor_seconds(process):
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def refusals(what, advice="bad"):
    """What others' code raises, which may be anything, becomes BadInput."""
    try:
        yield
    except (BadInput, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        text = " ".join(str(error).split())[:500]
        told = type(error) in (Exception, OSError, ValueError) and text
        raise BadInput(f"{what}: {text if told else f'{type(error).__name__} {text}'}", advice) from None


class Tokenizer:
    """A tokenizer.json, or a folder with the tokenizer of a model, as transformers has it."""

    def __init__(self, path):
        path = pathlib.Path(path)
        self.name = str(path)
        self.folder = path.is_dir()
        import tokenizers
        if self.folder:
            sys.modules.setdefault("torch", None)  # no tokenizer computes with it, and it takes seconds to import
            import transformers
            with refusals("transformers cannot load it"):
                self.of_model = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True,
                                                                           trust_remote_code=False)
                if not self.of_model.is_fast:
                    raise BadInput("it has no tokenizer.json, which says where in the text a token is")
                self.of_file = self.of_model.backend_tokenizer
            self.end = self.of_model.eos_token_id
        else:
            with refusals("it is no tokenizer.json"):
                self.of_file = tokenizers.Tokenizer.from_file(str(path))
            self.of_file.no_truncation()
            self.of_file.no_padding()
            self.end = None
        self.numbers = self.of_file.get_vocab(with_added_tokens=True)
        self.vocabulary = max(self.numbers.values()) + 1

    def encode(self, text, add_special_tokens):
        """Tokens, and the range of characters of each."""
        with refusals("the tokenizer refuses its text"):  # half of a surrogate pair, for example
            if self.folder:
                made = self.of_model(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True,
                                     verbose=False)
                return made["input_ids"], made["offset_mapping"]
            made = self.of_file.encode(text, add_special_tokens=add_special_tokens)
            return made.ids, made.offsets

    def chat_template(self, tools=None):
        if not self.folder:
            raise BadInput("messages need the tokenizer's folder, with its chat template")
        if self.of_model.chat_template is None:
            raise BadInput(f"the tokenizer in {self.name} has no chat template")
        with refusals("the chat template"):
            return self.of_model.get_chat_template(tools=tools)

    def render(self, messages, **options):
        """The chat template's text, or what options say."""
        with refusals("the chat template refuses it", "template"):
            made = self.of_model.apply_chat_template(messages, **{"tokenize": False, **options})
        if isinstance(made, str) and len(made) > DOCUMENT_BYTES_MAX:
            raise BadInput(f"the chat template makes {len(made)} characters of it")
        return made

    @functools.cached_property
    def added_tokens(self):
        """A pattern of the tokens that stand for themselves, as the marks of turns do."""
        texts = {token.content for token in self.of_file.get_added_tokens_decoder().values()}
        texts = sorted((text for text in texts if text.strip()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")
