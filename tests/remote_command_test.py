"""Remote devices by the command: a server, its clients. 77: this build lacks gRPC.

Usage: remote_command_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from command import COMMAND, run
from served import Authority, Server, free_port, small_recipe, what_it_made, with_environment


class WithServers(unittest.TestCase):
    """A folder for a class, in builds that have servers."""

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory(prefix="smartinf_test_")
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = pathlib.Path(scratch.name)
        told = run("serve", str(cls.folder / "none")).stderr
        if "without gRPC" in told:
            raise unittest.SkipTest(told)


class Remote(WithServers):
    """Commands over a server on this machine."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.authority = Authority(COMMAND, cls.folder / "ca", clients=("gpu1", "gpu2", "lost"))
        cls.server = Server(cls.authority, cls.folder / "server", ("fast0", "fast1", "fast2"), clients=("gpu1", "gpu2", "lost"))
        cls.enterClassContext(cls.server)

    def remote(self, *words, client="gpu1", **environment):
        return run(*words, **{**self.authority.environment(client), **environment})

    def done(self, *words, **more):
        done = self.remote(*words, **more)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

    def refused(self, *words, says, client="gpu1", **environment):
        done = self.remote(*words, client=client, **environment)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn(says, done.stderr)
        self.assertLess(done.stderr.count("\n"), 5, done.stderr)
        return done.stderr

    def step(self, *urls, keep=True):
        return ["bench", "step", "--params", "3e5", "--repeat", "1", "--io-bytes", "1048576", "--io-depth", "2",
                *(["--keep"] if keep else []), *(word for url in urls for word in ("--device", url))]

    def until(self, condition):
        for _ in range(600):
            if condition():
                return
            time.sleep(0.1)
        self.fail("it does not come")

    def test_calibrate_is_for_the_server_itself(self):
        done = run("calibrate", "--device", "grpc://nas:7443/fast0")
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("measured there", done.stderr)
        self.assertIn("Run smartinf calibrate on the server", done.stderr)

    def test_every_command_takes_a_remote_device(self):
        url = self.server.url()
        before = self.server.metrics("smartinf_device_received_bytes_total")
        self.done(*self.step(url))
        self.assertGreater(self.server.metrics("smartinf_device_received_bytes_total"), before + 2 * 3e5)
        self.assertGreater(self.server.metrics("smartinf_device_steps_committed_total"), 0)
        self.assertIn("committed", self.done("inspect", url))
        self.assertIn("sound", self.done("fsck", url))
        self.assertIn("room for", self.done("doctor", "--device", url))
        copy = str(self.folder / "copy")
        self.done("checkpoint", url, "--out", copy)
        (copy,) = pathlib.Path(copy).iterdir()
        self.done("restore", str(copy), "--device", self.server.url("fast1"))
        self.assertIn("sound", self.done("fsck", self.server.url("fast1")))

    def test_gc_lists_what_a_server_holds_and_deletes_by_name(self):
        server = Server(self.authority, self.folder / "gc", keys="lease_seconds = 1")
        self.enterContext(server)
        url = server.url()
        self.assertIn("nothing to delete", self.done("gc", url))
        self.refused("gc", server.url("fast9"), says='no device "fast9"')
        words = ["1000" if word == "1" else word for word in self.step(url)]
        busy = subprocess.Popen([COMMAND, *words], env=with_environment(self.authority.environment()),
                                stdout=subprocess.DEVNULL)
        self.addCleanup(busy.wait)
        self.addCleanup(busy.kill)
        self.until(lambda: server.metrics("smartinf_device_steps_committed_total") > 2)

        def holds():
            """Stopped where it has the device: between its steps it has not."""
            busy.send_signal(signal.SIGSTOP)
            time.sleep(0.3)  # for what it has sent before
            if server.metrics("smartinf_device_client") > 0:
                return True
            busy.send_signal(signal.SIGCONT)
            return False

        self.until(holds)
        self.assertIn("client gpu1", self.done("gc", url, "--states", "--yes"))
        busy.kill()
        self.until(lambda: "a complete state; --states also asks about it" in self.done("gc", url))
        (left,) = json.loads(self.done("gc", url, "--json", "--states"))["leftovers"]
        self.assertEqual((left["path"], left["deleted"]), (url, False))
        recipe = self.folder / "recipes/mine.toml"
        recipe.parent.mkdir()
        recipe.write_text(f'[[device]]\npath = "{url}"\n', encoding="utf-8")
        self.refused("gc", str(recipe.parent), url, "--delete-run", left["run"][:8], says="mine.toml")
        recipe.unlink()
        self.assertIn("freed", self.done("gc", str(recipe.parent), url, "--delete-run", left["run"][:8]))
        self.assertIn("nothing to delete", self.done("gc", url))

    def test_who_is_not_let_in_is_told_why(self):
        url = self.server.url()
        other = Authority(COMMAND, self.folder / "other")
        self.refused("inspect", url, says="ertificate", **dict.fromkeys(self.authority.environment(), ""))
        self.refused("inspect", url, says="was not issued by the authority",
                     SMARTINF_REMOTE_CA=other.files("clients", "gpu1")[2])
        self.refused("inspect", url, says="", **other.environment())
        self.refused("inspect", url.replace("fast0", "fast9"), says='no device "fast9" for client gpu1')
        server = dict(zip(self.authority.environment(), self.authority.files("servers", "127.0.0.1")))
        self.refused("inspect", url, says="is not for a client", **server)
        self.refused("inspect", url.replace("127.0.0.1", "127.0.0.2"), says="127.0.0.2")
        self.refused("inspect", f"grpc://127.0.0.1:{free_port()}/fast0", says="127.0.0.1")
        self.authority.run("--revoke", "lost")
        time.sleep(1.2)
        self.refused("inspect", url, client="lost", says="revoked")
        self.assertIn("client lost", self.server.log())

    def beside_another_server(self, version, talk):
        """What talk(connection) returns within a server of another make, with a certificate of the same authority, that
        speaks this version of TLS only, when the command asks it; None where it does not shake hands."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(*self.authority.files("servers", "127.0.0.1")[:2])
        done = []

        def serve(listener):
            with listener.accept()[0] as connection:
                try:
                    with context.wrap_socket(connection, server_side=True) as encrypted:
                        done.append(talk(encrypted))
                except OSError:
                    pass

        with socket.create_server(("127.0.0.1", 0)) as listener:
            other = threading.Thread(target=serve, args=(listener,), daemon=True)
            other.start()
            self.refused("inspect", f"grpc://127.0.0.1:{listener.getsockname()[1]}/fast0", says="connection")
            other.join(60)
        return done[0] if done else None

    def test_a_server_must_speak_tls_1_3(self):
        self.assertIsNone(self.beside_another_server(ssl.TLSVersion.TLSv1_2, lambda connection: True))
        self.assertTrue(self.beside_another_server(ssl.TLSVersion.TLSv1_3, lambda connection: True))

    def test_a_server_whose_headers_do_not_end_is_hung_up_on(self):
        def frame(kind, flags, stream, content=b""):
            return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content

        def flood(connection):
            field = b"\0\1x\x7f\x80\6" + b"v" * 895  # of which gRPC keeps each
            connection.sendall(frame(4, 0, 0) + frame(4, 1, 0) + frame(1, 0, 1, b"\x88"))
            for sent in range(1000):
                try:
                    connection.sendall(frame(9, 0, 1, field) * 70)
                except OSError:
                    return sent
            return 1000  # 64 MB

        self.assertLess(self.beside_another_server(ssl.TLSVersion.TLSv1_3, flood), 500)

    def test_a_port_in_use_is_one_sentence(self):
        second = Server(self.authority, self.folder / "second_at_the_port")
        second.change("listen", f"127.0.0.1:{self.server.port}")
        told = run("serve", str(second.file))
        self.assertEqual(told.returncode, 1, told)
        self.assertIn("is in use by another process", told.stderr)
        self.assertIn(f"127.0.0.1:{self.server.port}", told.stderr)
        self.assertEqual(told.stderr.count("\n"), 1, told.stderr)

    def test_metrics_are_a_file_for_others_to_read(self):
        self.assertEqual(self.server.metrics("smartinf_device_usable"), 3)
        self.assertEqual(self.server.metrics("smartinf_build_info"), 1)
        server = Server(self.authority, self.folder / "measured")
        with server:
            self.assertEqual(server.metrics("smartinf_device_usable"), 1)
            file = server.folder / "metrics.prom"
            self.assertEqual(file.stat().st_mode & 0o777, 0o644)
            (server.folder / "fast0").rename(server.folder / "gone")
            self.assertEqual(server.metrics("smartinf_device_usable"), 0)
            (server.folder / "gone").rename(server.folder / "fast0")
            # What cannot be written later on is a line in the log, and another one only after it could.
            file.unlink()
            file.mkdir()
            self.until(lambda: "cannot write the metrics" in server.log())
            file.rmdir()
            self.assertEqual(server.metrics("smartinf_device_usable"), 1)
            self.assertEqual(server.log().count("cannot write the metrics"), 1, server.log())
            server.end()
            self.assertFalse(file.exists(), "the numbers of a server that has ended are no news")
        server.change("metrics", "none/metrics.prom")
        told = run("serve", str(server.file))
        self.assertEqual(told.returncode, 1, told)
        self.assertIn(f"cannot write the metrics: {server.folder}/none/metrics.prom.new", told.stderr)
        server.change("metrics", "127.0.0.1:9464")
        told = run("serve", str(server.file))
        self.assertEqual(told.returncode, 2, told)
        self.assertIn('write metrics = "/var/lib/prometheus/node-exporter/smartinf.prom"', told.stderr)

    def test_what_is_kept_is_for_no_other_user(self):
        url = self.server.url("fast2")
        self.done(*self.step(url))
        state = self.server.folder / "fast2" / "smartinf.state"
        self.assertEqual(state.stat().st_mode & 0o777, 0o600)
        # Made by another umask.
        with Server(self.authority, self.folder / "open") as server:
            self.done(*self.step(server.url()))
            server.end()
            kept = server.folder / "fast0" / "smartinf.state"
            kept.chmod(0o644)
            server.start()
            self.assertIn(f"other users of this machine can read {kept}", server.log())

    def test_strangers_are_in_the_log_with_their_addresses(self):
        with socket.create_connection(("127.0.0.1", self.server.port)) as stranger:
            address = "%s:%d" % stranger.getsockname()
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(4096):
                pass
        self.until(lambda: address in self.server.log())
        self.assertLess(max(map(len, self.server.log().splitlines())), 3000)

    def test_it_ends_at_a_signal_and_goes_on_at_the_next_start(self):
        with Server(self.authority, self.folder / "second") as server:
            self.done(*self.step(server.url()))
            said = server.end()
            self.assertEqual(server.process.returncode, 0, said)
            self.assertIn("stopped", said)
            self.refused("inspect", server.url(), says="127.0.0.1")
            server.start()
            self.assertIn("committed", self.done("inspect", server.url()))
            server.end()
            key = pathlib.Path(self.authority.files("servers", "127.0.0.1")[1])
            key.chmod(0o644)
            self.addCleanup(key.chmod, 0o600)
            told = run("serve", str(server.file))
            self.assertEqual(told.returncode, 1)
            self.assertIn("open to others", told.stderr)


class Training(WithServers):
    """`smartinf train` whose server goes away in the middle of a run."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if "not in this build" in run("--help").stdout:
            raise unittest.SkipTest("built without torch")
        cls.authority = Authority(COMMAND, cls.folder / "ca")
        cls.recipe = small_recipe(cls.folder, steps=60)
        cls.local = cls.folder / "local"
        done = run("train", cls.recipe, "--train.run", str(cls.local))
        assert done.returncode == 0, done

    def setUp(self):
        name = self.id().rpartition(".")[2]
        self.made_in = self.folder / name
        self.server = Server(self.authority, self.folder / f"server_of_{name}")
        self.enterContext(self.server)
        self.remote = ["--device.0.path", self.server.url()]

    def train(self, *flags):
        """One that has taken three steps, and cannot take many more until somebody reads on: the pipe is small."""
        process = subprocess.Popen(
            [COMMAND, "train", self.recipe, "--json", "--train.run", str(self.made_in), *self.authority.flags(), *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pipesize=4096)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        while self.until(process, "loss")["step"] < 3:
            pass
        return process

    def until(self, process, key):
        for text in process.stdout:
            if key in (line := json.loads(text)):
                return line
        return self.fail(process.stderr.read())

    def end(self, process, code, timeout=120):
        """What it said of errors."""
        out, err = process.communicate(timeout=timeout)
        self.assertEqual(process.returncode, code, out + err)
        return err

    def made(self, folder):
        return what_it_made(COMMAND, folder)

    def test_it_goes_on_when_the_server_was_killed_and_comes_back(self):
        process = self.train(*self.remote)
        self.server.end(signal.SIGKILL)
        self.assertIn(self.server.url(), self.until(process, "lost")["lost"])
        self.server.start()
        self.assertGreaterEqual(self.until(process, "resumed_after_step")["resumed_after_step"], 2)
        self.until(process, "loss")
        self.server.end(signal.SIGKILL)
        self.server.start()
        self.end(process, 0)
        self.assertEqual(self.made(self.made_in), self.made(self.local))

    def test_it_goes_on_when_one_of_two_devices_was_stopped(self):
        own = self.folder / "own"
        process = self.train(*self.remote, "--device.1.path", str(own), "--device.0.bandwidth", "1e9",
                             "--device.1.bandwidth", "1e9", "--remote.reconnect_seconds", "60")
        self.assertRegex(self.server.end(signal.SIGTERM), "committed|prepared")
        self.server.start()
        self.until(process, "lost")
        self.end(process, 0)
        self.assertEqual(self.made(self.made_in)[:2], self.made(self.local)[:2])

    def test_a_server_that_stays_away_ends_it_after_the_time_that_was_said(self):
        process = self.train(*self.remote, "--remote.restart_seconds", "2")
        self.server.end(signal.SIGKILL)
        said = self.end(process, 1)
        self.assertRegex(said, r"training has made no progress for (?!0|1[. ])[0-9].*run the command again")
        self.assertIn("remote.restart_seconds", said)

    def test_it_ends_at_once_where_the_recipe_says_so(self):
        process = self.train(*self.remote, "--remote.restart_seconds", "0")
        self.server.end(signal.SIGTERM)
        self.server.start()
        said = self.end(process, 1)
        self.assertIn(self.server.url(), said)
        self.assertNotIn("restart_seconds", said)
        done = run("train", str(self.made_in / "recipe.toml"))
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(self.made(self.made_in), self.made(self.local))

    def test_ctrl_c_ends_the_waiting(self):
        process = self.train(*self.remote)
        self.server.end(signal.SIGKILL)
        self.until(process, "lost")
        process.send_signal(signal.SIGINT)
        self.end(process, 130, timeout=100)


class Limits(WithServers):
    """What gRPC would end the process for is an error that says what to raise."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.authority = Authority(COMMAND, cls.folder / "ca")
        cls.server = Server(cls.authority, cls.folder / "server")

    def refused(self, *words, limit, value):
        done = subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60, check=False,
                              env=with_environment(self.authority.environment()),
                              preexec_fn=lambda: resource.setrlimit(limit, (value, value)))
        self.assertEqual(done.returncode, 1, done)
        self.assertRegex(done.stderr, r"smartinf: .*ulimit -[nuv]")

    def test_a_server_needs_files_and_memory(self):
        for files in (6, 8, 12, 24):
            self.refused("serve", str(self.server.file), limit=resource.RLIMIT_NOFILE, value=files)
        for mb in (60, 160):  # what is enough differs by machine
            self.refused("serve", str(self.server.file), limit=resource.RLIMIT_AS, value=mb << 20)

    def test_so_does_a_client(self):
        for limit, value in ((resource.RLIMIT_NOFILE, 8), (resource.RLIMIT_AS, 160 << 20)):
            self.refused("inspect", self.server.url(), limit=limit, value=value)


class ServerFile(unittest.TestCase):
    def test_mistakes_are_named_with_their_place(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "serve.toml"
            good = ('certificate = "c"\nkey = "k"\nca = "a"\n[[device]]\nname = "a"\npath = "a"\nclients = ["x"]\n')
            for wrong, says in (('listne = "x"\n' + good, "serve.toml:1:1: unknown key 'listne'; did you mean listen?"),
                                ("listen = 7\n" + good, "serve.toml:1:10: listen: expected a text"),
                                (good.replace('clients = ["x"]', ""), "does not say who may use it"),
                                (good.replace("[[device]]", "[device]"), "write [[device]]"),
                                (good.replace('key = "k"\n', ""), "'key' is missing"),
                                (good.replace('"a"\npath', '"a/b"\npath'), "needs a name"),
                                (good + good[good.index("[["):], "two devices are named a"),
                                (good + "threads = 0\n", "a whole number from 1"), (good + 'quota = "x"\n', 'such as "4GiB"'),
                                (good[:30], "serve.toml"), ("lease_seconds = 0\n" + good, "seconds from 1"),
                                (good, "there is no directory or block device")):
                file.write_text(wrong, encoding="utf-8")
                done = run("serve", str(file))
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(says, done.stderr)


if __name__ == "__main__":
    result = unittest.main(exit=False).result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.skipped else 0)
