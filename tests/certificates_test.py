"""`smartinf certificates` and the script behind it, scripts/certificates.py. 77: there is no openssl command here.

Usage: certificates_test.py PATH/TO/smartinf PROJECT_ROOT
"""
import contextlib
import fcntl
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

from command import COMMAND, ROOT, run

sys.path.insert(0, str(ROOT / "scripts"))
import certificates as script  # noqa: E402


def openssl(*words):
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=False)


class Names(unittest.TestCase):
    def refused(self, role, name):
        with contextlib.redirect_stderr(io.StringIO()) as told, self.assertRaises(SystemExit, msg=name) as ended:
            script.check_name(role, name)
        self.assertEqual(ended.exception.code, 2)
        self.assertIn(f"is no name of a {role}", told.getvalue())

    def test_servers_are_dns_names_or_addresses(self):
        for good in ("nas", "nas.example.org", "10.0.0.5", "::1", "fd00::12", "3com.com", "a-b.c", "a" * 63):
            script.check_name("server", good)
        for bad in ("", "-nas", "nas-", "a..b", ".a", "a.", "10.0.0.256", "10.0.0", "a/b", "../x", "a,DNS:b", "nas\n",
                    "n\0s", "10.0.0.5\0x", "nás", "a" * 64, "a." * 126 + "ab", "a.-b", "a-.b", "::1%lo", "\u0661"):
            self.refused("server", bad)

    def test_clients_are_plain(self):
        for good in ("gpu1", "a", "team_a.node-7", "9", "a" * 64):
            script.check_name("client", good)
        for bad in ("", ".", "..", "-a", "a/b", "a b", "a\n", "a\0", "a" * 65, "ä"):
            self.refused("client", bad)


class Certificates(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.ca = self.folder / "ca"
        self.crl = self.ca / "revoked.crl"

    def certificates(self, *words, folder=None, **more):
        done = subprocess.run([COMMAND, "certificates", "--ca", str(folder or self.ca), *words], capture_output=True,
                              text=True, timeout=120, check=False, **more)
        self.assertNotIn("Traceback", done.stderr)
        return done

    def done(self, *words, **more):
        done = self.certificates(*words, **more)
        self.assertEqual(done.returncode, 0, done)
        return done.stdout

    def refused(self, *words, says, code=1, **more):
        done = self.certificates(*words, **more)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done)
        self.assertTrue(done.stderr.startswith("smartinf: ") and done.stderr.count("\n") == 1, done)
        self.assertIn(says, done.stderr)

    def verified(self, kind, name, *words):
        """Whether openssl takes a certificate for what the words say."""
        folder = self.ca / kind / name
        return openssl("verify", "-x509_strict", "-CAfile", folder / "ca.pem", *words,
                       folder / "certificate.pem").returncode == 0

    def serials(self):
        return dict(re.findall(r"(?m)^\w+ +(\S+) .* ([0-9a-f]{32})  ", self.done("--list")))

    def test_are_what_openssl_expects(self):
        made = self.done("--server", "nas", "--address", "10.0.0.5", "::1", "--address", "nas.lan", "--days", "30",
                         "--client", "gpu1", "gpu2")
        self.assertRegex(made, rf"made the authority in {self.ca}, valid until 20\d\d-")
        self.assertRegex(made, r"server nas, valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC, reached as nas, 10.0.0.5, ::1, "
                               rf"nas.lan: {self.ca}/servers/nas/")
        self.assertRegex(made, rf"client gpu2, valid until .*: {self.ca}/clients/gpu2/")
        crl = ("-crl_check", "-CRLfile", self.crl)
        server = (*crl, "-purpose", "sslserver")
        self.assertTrue(self.verified("servers", "nas", *server, "-verify_hostname", "nas"))
        self.assertTrue(self.verified("servers", "nas", *server, "-verify_hostname", "nas.lan"))
        self.assertTrue(self.verified("servers", "nas", *server, "-verify_ip", "10.0.0.5"))
        self.assertTrue(self.verified("servers", "nas", *server, "-verify_ip", "::1"))
        self.assertFalse(self.verified("servers", "nas", *server, "-verify_hostname", "other"))
        self.assertFalse(self.verified("servers", "nas", "-purpose", "sslclient"))
        self.assertTrue(self.verified("clients", "gpu1", *crl, "-purpose", "sslclient"))
        self.assertFalse(self.verified("clients", "gpu1", "-purpose", "sslserver"))
        # No authority below this one; each lives as long as it was asked to.
        authority = self.ca / "ca/certificate.pem"
        self.assertIn("CA:TRUE, pathlen:0", openssl("x509", "-in", authority, "-noout", "-text").stdout)
        for file, days in ((authority, 3650), (self.ca / "servers/nas/certificate.pem", 30)):
            for seconds, ends in ((days * 86400 + 60, 1), (days * 86400 - 900, 0)):
                self.assertEqual(openssl("x509", "-in", file, "-noout", "-checkend", seconds).returncode, ends, file)
        self.assertEqual(len(set(self.serials().values())), 3)

    def test_a_folder_is_what_it_always_was(self):
        """Earlier versions made the same files, and can go on with these; nothing else is needed to go on."""
        self.done("--server", "nas", "--client", "gpu1")
        serials = self.serials().values()
        files = {str(path.relative_to(self.ca)): path.stat().st_mode & 0o7777 for path in self.ca.rglob("*")
                 if path.is_file()}
        of_one = {"key.pem": 0o600, "certificate.pem": 0o644, "ca.pem": 0o644}
        self.assertEqual(files, {"revoked.crl": 0o644, "ca/key.pem": 0o600, "ca/certificate.pem": 0o644,
                                 **{f"issued/{serial}.pem": 0o644 for serial in serials},
                                 **{f"servers/nas/{name}": mode for name, mode in of_one.items()},
                                 **{f"clients/gpu1/{name}": mode for name, mode in of_one.items()}})

    def test_keys_are_for_nobody_else(self):
        self.done("--server", "nas", "--client", "gpu1", umask=0)
        for path in [self.ca, *self.ca.rglob("*")]:
            if path.is_dir() or path.name == "key.pem":
                self.assertEqual(path.stat().st_mode & 0o077, 0, path)
        self.ca.chmod(0o750)
        self.refused("--list", says="chmod 700")
        self.refused("--client", "gpu2", says="chmod 700")

    def test_a_key_is_closed_from_its_first_moment(self):
        """Every file is followed from its creation by strace, with the widest umask."""
        if not shutil.which("strace"):
            self.skipTest("no strace here")
        log = self.folder / "log"
        subprocess.run(["strace", "-f", "-e", "trace=openat,open,creat,chmod,fchmod,rename", "-o", str(log), COMMAND,
                        "certificates", "--ca", str(self.ca), "--client", "a"], check=True, capture_output=True, umask=0)
        created = re.findall(r'openat\([^"]*"([^"]*key\.pem[^"]*)", \S*O_CREAT\S*, (\d+)', log.read_text())
        self.assertEqual(len(created), 2, created)
        self.assertEqual({mode for _, mode in created}, {"0600"})

    def test_revoked_ones_are_listed(self):
        self.done("--server", "nas", "--client", "gpu1", "gpu2", "gpu3")
        crl = ("-crl_check", "-CRLfile", self.crl)
        before = openssl("crl", "-in", self.crl, "-noout", "-crlnumber").stdout
        self.assertIn("revoked.crl to every server", self.done("--revoke", "gpu1"))
        listed = self.done("--list")
        self.assertRegex(listed, r"(?m)^client  gpu1 .* [0-9a-f]{32}  revoked 20")
        self.assertRegex(listed, r"(?m)^client  gpu2 .* [0-9a-f]{32}  valid$")
        self.assertFalse(self.verified("clients", "gpu1", *crl))
        self.assertTrue(self.verified("clients", "gpu2", *crl))
        serial = self.serials()["gpu2"]
        self.assertIn(f"revoked: client gpu2, serial {serial}", self.done("--revoke", serial, "gpu3"))
        for name in ("gpu1", "gpu2", "gpu3"):
            self.assertFalse(self.verified("clients", name, *crl), name)
        self.assertTrue(self.verified("servers", "nas", *crl))
        self.assertNotEqual(openssl("crl", "-in", self.crl, "-noout", "-crlnumber").stdout, before)
        self.refused("--revoke", "gpu1", says="revoked already")
        self.refused("--revoke", "gpu4", says="--list")
        # A new one of the same name is not revoked.
        shutil.rmtree(self.ca / "clients/gpu1")
        self.done("--client", "gpu1")
        self.assertTrue(self.verified("clients", "gpu1", *crl))

    def test_nothing_is_overwritten(self):
        self.done("--client", "gpu1")
        key = self.ca / "clients/gpu1/key.pem"
        before = key.read_bytes()
        self.refused("--client", "gpu1", says="client gpu1 has a certificate already")
        self.assertEqual(key.read_bytes(), before)
        self.assertEqual(len(list((self.ca / "issued").iterdir())), 1)
        shutil.rmtree(self.ca / "clients/gpu1")
        self.done("--client", "gpu1", "--days", "20")
        self.assertIn("expires in 19 days", self.done("--list"))
        # Nor anything that is no authority's.
        home = self.folder / "home"
        home.mkdir(mode=0o700)
        (home / "notes").write_text("mine", encoding="ascii")
        self.refused("--client", "gpu1", folder=home, says="holds other things")
        self.assertEqual([path.name for path in home.iterdir()], ["notes"])

    def test_wrong_words_make_nothing(self):
        for words, says in ((("--client", "a/b"), "no name of a client"), (("--server", "x y"), "no name of a server"),
                            (("--server", "a", "--address", "b c"), "no name of a server"),
                            (("--client", "a", "--days", "0"), "--days is 0. Choose 1 to 3650"),
                            (("--client", "a", "--days", "3651"), "--days is 3651"), ((), "one of these is needed"),
                            (("--client", "a", "--list"), "one of these is needed"),
                            (("--client", "a", "--address", "b"), "--address is for one --server"),
                            (("--cleint", "a"), "unrecognized arguments: --cleint a. See smartinf certificates --help")):
            self.refused(*words, says=says, code=2)
            self.assertFalse(self.ca.exists())
        self.refused("--client", "a", folder="$HOME/ca", says="expanded by shells only", code=2)
        self.assertEqual(run("certificates", "--list").returncode, 2)
        self.ca.mkdir(mode=0o700)
        self.refused("--list", says="there is no certificate authority in the folder")
        self.refused("--list", folder=self.folder / "none", says=f"No such file or directory: {self.folder}/none")

    def test_one_call_at_a_time(self):
        self.done("--client", "gpu1")
        held = os.open(self.ca, os.O_RDONLY)
        self.addCleanup(os.close, held)
        fcntl.flock(held, fcntl.LOCK_EX)
        self.refused("--list", says="another process is using")

    def test_what_was_interrupted_is_done_again(self):
        (self.ca / ".making").mkdir(parents=True)
        self.ca.chmod(0o700)
        (self.ca / ".making/key.pem").write_text("half a key", encoding="ascii")
        (self.ca / "issued").mkdir()
        self.done("--client", "gpu1")
        self.assertFalse((self.ca / ".making").exists())
        self.assertTrue(self.verified("clients", "gpu1"))

    def test_files_that_do_not_fit(self):
        self.done("--client", "gpu1")
        other = self.folder / "other"
        self.done("--client", "gpu1", folder=other)
        for file, says in (("ca/key.pem", "not the key of the authority's certificate"),
                           ("revoked.crl", "not the authority's list of revoked certificates")):
            before = (self.ca / file).read_bytes()
            shutil.copy(other / file, self.ca / file)
            self.refused("--client", "gpu2", says=says)
            (self.ca / file).write_text("no PEM", encoding="ascii")
            self.refused("--revoke", "gpu1", says=str(self.ca / file))
            (self.ca / file).write_bytes(before)
        self.done("--client", "gpu2")

    def test_never_outlive_their_authority(self):
        with unittest.mock.patch.object(script, "AUTHORITY_DAYS", 10), contextlib.redirect_stdout(io.StringIO()):
            authority = script.Authority(self.ca, make=True)
            authority.issue("client", "gpu1", [], 20)
            os.close(authority.lock)
        ends = {openssl("x509", "-in", path, "-noout", "-enddate").stdout
                for path in (self.ca / "ca/certificate.pem", self.ca / "clients/gpu1/certificate.pem")}
        self.assertEqual(len(ends), 1, ends)

    def test_says_what_is_missing(self):
        python = {"SMARTINF_PYTHON": sys.executable, "PATH": str(self.folder)}
        self.refused("--client", "a", says="Install openssl", env={**os.environ, **python})
        self.refused("--list", says="SMARTINF_PYTHON", env={**os.environ, "SMARTINF_PYTHON": "no-such-python"})


if __name__ == "__main__":
    if not shutil.which("openssl"):
        sys.exit(77)
    unittest.main()
