"""A server of remote devices for tests, with certificates of its own; and small runs that use it."""
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time


def free_port():
    """One that nobody has now: a server that is started again must have the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Authority:
    """Certificates in a folder, for a server that is reached as 127.0.0.1 and by other addresses."""

    def __init__(self, smartinf, folder, addresses=(), clients=("gpu1",)):
        self.smartinf = smartinf
        self.folder = pathlib.Path(folder)
        words = [word for address in ("localhost", *addresses) for word in ("--address", address)]
        self.run("--server", "127.0.0.1", *words, *(word for name in clients for word in ("--client", name)))

    def run(self, *words):
        return subprocess.run([self.smartinf, "certificates", "--ca", str(self.folder), *words], check=True,
                              capture_output=True, text=True, timeout=60).stdout

    def files(self, kind, name):
        """certificate, key and ca, in this order."""
        return [str(self.folder / kind / name / file) for file in ("certificate.pem", "key.pem", "ca.pem")]

    def environment(self, client="gpu1"):
        """For commands, which use devices as this client."""
        names = ("SMARTINF_REMOTE_CERTIFICATE", "SMARTINF_REMOTE_KEY", "SMARTINF_REMOTE_CA")
        return dict(zip(names, self.files("clients", client)))

    def flags(self, client="gpu1"):
        """For `smartinf train`."""
        return [word for key, file in zip(("certificate", "key", "ca"), self.files("clients", client))
                for word in (f"--remote.{key}", file)]


class Server:
    """`smartinf serve` over folders of its own; on: what stands before the command. It goes on at the same port when
    it is started again."""

    def __init__(self, authority, folder, devices=("fast0",), clients=("gpu1",), host="127.0.0.1", on=(), keys="",
                 device_keys="", threads=1):
        self.authority = authority
        self.folder = pathlib.Path(folder)
        self.on = list(on)
        self.host = host
        self.port = free_port()
        self.process = None
        certificate, key, ca = authority.files("servers", "127.0.0.1")
        names = ", ".join(f'"{name}"' for name in clients)
        text = (f'listen = "{host}:{self.port}"\ncertificate = "{certificate}"\nkey = "{key}"\nca = "{ca}"\n'
                f'revoked = "{authority.folder / "revoked.crl"}"\nmetrics = "metrics.prom"\nmetrics_seconds = 0.1\n{keys}\n')
        self.folder.mkdir(exist_ok=True)
        for device in devices:
            (self.folder / device).mkdir()
            # As if measured before: that takes long on a busy drive.
            (self.folder / device / "smartinf.tuning").write_text(
                "io_bytes = 1048576\nio_depth = 4\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n",
                encoding="ascii")
            text += (f'[[device]]\nname = "{device}"\npath = "{device}"\nclients = [{names}]\n'
                     f'threads = {threads}\nbandwidth = "1GB"\n{device_keys}\n')
        self.file = self.folder / "serve.toml"
        self.file.write_text(text, encoding="utf-8")

    def url(self, device="fast0"):
        return f"grpc://{self.host}:{self.port}/{device}"

    def change(self, key, text):
        """Of a key whose value is a text."""
        before = self.file.read_text(encoding="utf-8")
        self.file.write_text(re.sub(rf'(?m)^{key} = ".*"$', f'{key} = "{text}"', before), encoding="utf-8")

    def start(self):
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([*self.on, self.authority.smartinf, "serve", str(self.file)],
                                            stdout=subprocess.PIPE, stderr=log, text=True)
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith("serving at "):
                return self
        raise AssertionError(f"the server did not start: {said} {self.log()}")

    def log(self):
        return (self.folder / "log").read_text(encoding="utf-8")

    def end(self, number=signal.SIGTERM, timeout=150):
        """What it says at its end; its exit code is in process.returncode."""
        if self.process is None:
            return ""
        if self.process.poll() is None:
            self.process.send_signal(number)
        said = self.process.communicate(timeout=timeout)[0]
        return said

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.end(signal.SIGKILL)

    def metrics(self, name):
        """Of a family, summed over its samples: as of now, which is what the second writing from now on has."""
        file = self.folder / "metrics.prom"
        seen = [time.time_ns()]
        while len(seen) < 3 and self.process.poll() is None:
            time.sleep(0.01)
            at = file.stat().st_mtime_ns if file.is_file() else 0
            seen += [at] if at > seen[-1] else []
        text = file.read_text(encoding="utf-8")
        return sum(float(value) for value in re.findall(rf"(?m)^{name}(?:\{{.*\}})? (\S+)$", text))


def with_environment(words):
    return {**os.environ, **words}


RECIPE = """
[model]
layers = 2
width = 64
heads = 2
kv_heads = 1
mlp_width = 128
[data]
paths = ["{corpus}"]
sequence = 32
validation_share = 0.1
[train]
steps = {steps}
micro_batch = 2
threads = 1
validate_every = 25
[engine]
subgroup_elements = 65536
io_size = "1MiB"
io_depth = 2
memory_budget = "32MiB"
[remote]
reconnect_seconds = 0.5
"""


def small_recipe(folder, steps):
    """Of a model that takes some milliseconds a step."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{i * i} is the square of {i}\n" for i in range(3000)), encoding="ascii")
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE.format(corpus=corpus, steps=steps), encoding="utf-8")
    return str(recipe)


def what_it_made(smartinf, run, on=()):
    """Of a run: its steps in the log, its weights, and copies of its devices' states."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    # Who is killed between a step and its validation leaves none.
    log = [[line[key] for key in ("step", "loss", "gradient_norm")] for line in lines if "loss" in line]
    with tempfile.TemporaryDirectory() as scratch:
        for words in (("export", "--type", "f32"), ("checkpoint",)):
            subprocess.run([*on, smartinf, words[0], str(run), "--out", f"{scratch}/{words[0]}", *words[1:]], check=True,
                           capture_output=True, timeout=120)
        weights = pathlib.Path(scratch, "export/model.safetensors").read_bytes()
        copies = sorted(pathlib.Path(scratch, "checkpoint").rglob("smartinf.state"))
        # The state stands at the end: weights and both moments in f32.
        return log, weights, [copy.read_bytes()[-3 * (len(weights) & ~0xffff):] for copy in copies]
