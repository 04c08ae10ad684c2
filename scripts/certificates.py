#!/usr/bin/env python3
"""Makes, lists and revokes what the two sides of a remote device show each other, by the openssl command (3.0 or
newer). `smartinf certificates` runs it.

The folder of the authority has mode 0700 and holds

    ca/key.pem, ca/certificate.pem   the authority itself; the key never leaves this folder
    revoked.crl                      the certificates that are revoked (a PEM CRL)
    issued/SERIAL.pem                every certificate issued, for the list
    servers/NAME/, clients/NAME/     key.pem, certificate.pem and ca.pem: what that machine needs

and nothing else: openssl's database of a call is made from these files. While a call lasts, no other changes them.
"""
import argparse
import fcntl
import ipaddress
import os
import pathlib
import re
import secrets
import shutil
import ssl
import subprocess
import sys
import time

AUTHORITY_DAYS = 3650
SOON_DAYS = 30  # before its end the list points at a certificate
DAY = 86400
CLOCK_DIFFERENCE = 300  # seconds between two machines: what is issued is valid that much longer already

CONFIG = """
[req]
distinguished_name = name
[ca]
default_ca = authority
[authority]
database = index
serial = serial
crlnumber = number
new_certs_dir = .
default_md = sha256
policy = name
x509_extensions = extensions
[name]
commonName = supplied
[extensions]
subjectKeyIdentifier = hash
"""
OF_AUTHORITY = """basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
"""
OF_ISSUED = """basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
authorityKeyIdentifier = keyid:always
extendedKeyUsage = {}Auth
subjectAltName = {}
"""


def fail(what, path="", advice="", code=1):
    what += f": {path}" if path else ""
    print(f"smartinf: {what}{'. ' if advice else ''}{advice}", file=sys.stderr)
    sys.exit(code)


def openssl(*words, folder=None, wrong=None):
    """What the command says on both outputs. wrong: what its failure means, for fail()."""
    try:
        done = subprocess.run(["openssl", *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, cwd=folder, check=False)
    except FileNotFoundError:
        fail("there is no openssl command", advice="Install openssl (Debian, Ubuntu).")
    if done.returncode != 0 and wrong:
        fail(*wrong)
    if done.returncode != 0:
        fail(f"openssl {words[0]} has failed: {' '.join(done.stdout.split())[:500]}")
    return done.stdout


def utc_text(seconds):
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def asn1_text(seconds):
    return time.strftime("%Y%m%d%H%M%SZ", time.gmtime(seconds))


def is_address(text):
    try:
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def check_name(role, name):
    if role == "server":
        label = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
        # A last label of digits alone is an address that was mistyped.
        good = is_address(name) or len(name) <= 253 and re.fullmatch(rf"({label}\.)*(?!\d+$){label}", name)
        advice = "Give what clients connect to: a DNS name (nas.example.org) or an IP address."
    else:
        good = re.fullmatch("[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}", name)
        advice = "Use up to 64 letters, digits, '.', '-' and '_', a letter or digit first."
    if not good:
        fail(f"'{name}' is no name of a {role}", advice=advice, code=2)


def sync(path):
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


class Authority:
    def __init__(self, folder, make):
        self.folder = pathlib.Path(folder)
        self.ca = self.folder / "ca"
        self.making = self.folder / ".making"  # the work of a call; what one that died has left is removed
        self.revoked = {}  # serial: when, in seconds since 1970
        self.crl_number = 0
        self.take_folder(make)
        if self.ca.exists():
            self.read()
        else:
            self.make()

    def take_folder(self, make):
        makes_one = "smartinf certificates --ca DIR --server NAME --client NAME makes one."
        if make:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        elif not self.folder.exists():
            fail("No such file or directory", self.folder, makes_one)
        self.lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(self.lock).st_mode & 0o077:
            fail("the folder is open to others, and whoever has its key can connect as anybody", self.folder,
                 "Choose a folder that does not exist yet, or close this one: chmod 700.")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail("another process is using this certificate authority", self.folder, "Wait until it has ended.")
        shutil.rmtree(self.making, ignore_errors=True)
        if self.ca.exists():
            return
        if not make:
            fail("there is no certificate authority in the folder", self.folder, makes_one)
        # Without the authority only what a process that died while making one may have left is there.
        if {path.name for path in self.folder.iterdir()} - {"issued", "servers", "clients", "revoked.crl"}:
            fail("the folder holds other things, and no certificate authority", self.folder,
                 "Choose a folder that is empty or does not exist yet.")

    def work(self, extensions=""):
        """A new folder for a call of openssl, with its configuration and an empty database."""
        shutil.rmtree(self.making, ignore_errors=True)
        (self.making / "out").mkdir(mode=0o700, parents=True)
        self.making.chmod(0o700)
        for name, text in (("config", CONFIG + extensions), ("index", ""), ("number", f"{self.crl_number + 1:08X}")):
            (self.making / name).write_text(text, encoding="ascii")

    def put(self, made, path):
        """It appears at once, or not at all."""
        for file in made.iterdir() if made.is_dir() else [made]:
            file.chmod(0o600 if file.name == "key.pem" else 0o644)
            sync(file)
        made.rename(path)
        sync(path.parent)

    def sign(self, name, begin, end, *signer):
        """Key and certificate in the folder .making/out. Returns the serial number."""
        serial = f"{secrets.randbits(127) | 1 << 127:032x}"  # 32 digits always
        (self.making / "serial").write_text(serial, encoding="ascii")
        # ECDSA on P-256 is accepted by every TLS library that gRPC is built with; its file is created with mode 0600.
        # A common name has room for 64 characters; what clients look at are the other names.
        openssl("req", "-new", "-config", "config", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-keyout", "out/key.pem", "-out", "request", "-subj", f"/CN={name[:64]}", folder=self.making)
        openssl("ca", "-config", "config", "-batch", "-notext", "-in", "request", "-out", "out/certificate.pem",
                "-startdate", asn1_text(begin), "-enddate", asn1_text(end), *signer, folder=self.making)
        return serial

    def make(self):
        for name in ("issued", "servers", "clients"):
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        now = time.time()
        self.until = int(now + AUTHORITY_DAYS * DAY)
        self.work(OF_AUTHORITY)
        # A part of the name is by chance, so that two authorities are told apart.
        self.sign("smartinf authority " + secrets.token_hex(4), now - CLOCK_DIFFERENCE, self.until, "-selfsign",
                  "-keyfile", "out/key.pem")
        self.write_crl("out")
        self.put(self.making / "out", self.ca)
        print(f"made the authority in {self.folder}, valid until {utc_text(self.until)}")

    def read(self):
        key, certificate, crl = self.ca / "key.pem", self.ca / "certificate.pem", self.folder / "revoked.crl"
        self.until = self.facts(certificate)["until"]
        if openssl("pkey", "-in", key, "-pubout") != openssl("x509", "-in", certificate, "-noout", "-pubkey"):
            fail("this is not the key of the authority's certificate", key,
                 "Bring back both files of the folder from one copy.")
        wrong = ("this is not the authority's list of revoked certificates", crl,
                 "Bring it back from a copy, for example from a server.")
        shown = openssl("crl", "-in", crl, "-noout", "-text", "-crlnumber", "-CAfile", certificate, wrong=wrong)
        if "verify OK" not in shown:
            fail(*wrong)
        self.crl_number = int(re.search(r"(?m)^crlNumber=(?:0x)?([0-9A-F]+)", shown)[1], 16)
        entries = re.findall(r"Serial Number: (\w+)\s+Revocation Date: (.*)", shown)
        self.revoked = {serial.lower(): ssl.cert_time_to_seconds(when) for serial, when in entries}

    def write_crl(self, ca="../ca"):
        """The list with its next number, signed. It is valid until a newer one comes: as long as the authority."""
        # Two digits of the year are as a certificate has them.
        lines = [f"R\t{asn1_text(self.until)[2:]}\t{asn1_text(when)[2:]}\t{serial.upper()}\tunknown\t/CN=revoked\n"
                 for serial, when in self.revoked.items()]
        (self.making / "index").write_text("".join(lines), encoding="ascii")
        openssl("ca", "-gencrl", "-config", "config", "-keyfile", f"{ca}/key.pem", "-cert", f"{ca}/certificate.pem",
                "-crl_nextupdate", asn1_text(self.until), "-out", "revoked.crl", folder=self.making)
        self.crl_number += 1
        self.put(self.making / "revoked.crl", self.folder / "revoked.crl")

    def facts(self, path):
        shown = openssl("x509", "-in", path, "-noout", "-serial", "-subject", "-nameopt", "RFC2253", "-startdate",
                        "-enddate", "-ext", "extendedKeyUsage")
        said = dict(re.findall(r"(?m)^(\w+)=(.*)", shown))
        begin, until = (ssl.cert_time_to_seconds(said[name]) for name in ("notBefore", "notAfter"))
        return {"from": begin, "name": said["subject"].removeprefix("CN="), "serial": said["serial"].lower(),
                "until": until, "role": "server" if "Web Server" in shown else "client"}

    def issued(self):
        """All that were ever issued, the oldest first."""
        issued = [self.facts(path) for path in (self.folder / "issued").glob("*.pem")]
        return sorted(issued, key=lambda facts: (facts["from"], facts["name"], facts["serial"]))

    def issue(self, role, name, addresses, days):
        if self.until <= time.time():
            fail(f"the certificate authority itself expired on {utc_text(self.until)}", self.folder,
                 "Make a new one in another folder, and new certificates of all machines.")
        target = self.folder / f"{role}s" / name
        if os.path.lexists(target):
            fail(f"the {role} {name} has a certificate already", target, "Remove its folder to make a new one; the old "
                 "certificate stays valid until it expires or is revoked (--revoke).")
        # A client's is a URI, which no host name that is looked for can be.
        names = [f"{'IP' if is_address(one) else 'DNS'}:{one}" for one in addresses] or [f"URI:smartinf:client:{name}"]
        begin = time.time() - CLOCK_DIFFERENCE
        until = min(int(begin + days * DAY), self.until)
        self.work(OF_ISSUED.format(role, ",".join(names)))
        serial = self.sign(name, begin, until, "-keyfile", "../ca/key.pem", "-cert", "../ca/certificate.pem")
        # In the list first: a certificate that is out can always be revoked.
        shutil.copy(self.making / "out/certificate.pem", self.making / "listed.pem")
        self.put(self.making / "listed.pem", self.folder / "issued" / f"{serial}.pem")
        shutil.copy(self.ca / "certificate.pem", self.making / "out/ca.pem")
        self.put(self.making / "out", target)
        print(f"{role} {name}, valid until {utc_text(until)}{', reached as ' if addresses else ''}"
              f"{', '.join(addresses)}: {target}/")

    def list(self):
        print(f"authority in {self.folder}, valid until {utc_text(self.until)}")
        issued = self.issued()
        width = max([4, *(len(facts["name"]) for facts in issued)])
        if issued:
            print(f"{'for':6}  {'name':{width}}  {'valid until':20}  {'serial':32}  condition")
        for facts in issued:
            days = (facts["until"] - time.time()) // DAY
            condition = "valid" if days >= SOON_DAYS else f"expires in {days:.0f} days" if days >= 0 else "expired"
            if facts["serial"] in self.revoked:
                condition = f"revoked {utc_text(self.revoked[facts['serial']])}"
            print(f"{facts['role']:6}  {facts['name']:{width}}  {utc_text(facts['until']):20}  {facts['serial']:32}  "
                  f"{condition}")

    def revoke(self, name):
        """All certificates of a name, or the one with a serial number."""
        found = [facts for facts in self.issued() if name in (facts["name"], facts["serial"])]
        if not found:
            fail(f"no certificate was issued to {name}", self.folder,
                 "See smartinf certificates --ca DIR --list for names and serial numbers.")
        found = [facts for facts in found if facts["serial"] not in self.revoked]
        if not found:
            fail(f"{name} is revoked already", self.folder)
        self.revoked.update((facts["serial"], int(time.time())) for facts in found)
        self.work()
        self.write_crl()
        for facts in found:
            print(f"revoked: {facts['role']} {facts['name']}, serial {facts['serial']}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message, advice=f"See {self.prog} --help.", code=2)


def parse(words):
    parser = Parser(
        prog="smartinf certificates", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Make certificates for servers and users of remote devices",
        epilog="""\
Each certificate is put into DIR/servers/NAME/ or DIR/clients/NAME/ with its key and the
authority's certificate: copy that folder to the machine. DIR itself stays where nobody else
can read it. Nothing is overwritten: to renew, remove the folder of a name first.

Examples:
  smartinf certificates --ca ~/ca --server nas --address 10.0.0.5 --client gpu1 --client gpu2
  smartinf certificates --ca ~/ca --list
  smartinf certificates --ca ~/ca --revoke gpu2""")
    parser.add_argument("--ca", metavar="DIR", required=True, help="Folder of the authority; made when it is not there")
    for name, text in (
            ("--server", "Make a server's certificate: the name or address that clients connect to"),
            ("--address", "A further name or address of the server, such as 10.0.0.5 or localhost"),
            ("--client", "Make a client's certificate: the name that the server's list of clients has"),
            ("--revoke", "Revoke all certificates of a name, or the one with a serial number")):
        parser.add_argument(name, metavar="NAME", nargs="+", action="extend", default=[], help=text)
    parser.add_argument("--days", metavar="N", type=int, default=365, help="Days of the certificates [365]")
    parser.add_argument("--list", action="store_true", help="List what was issued, what expired and what is revoked")
    given = parser.parse_args(words)
    # What is wrong with the words is found before anything is made.
    for role, names in (("server", given.server), ("client", given.client), ("server", given.address)):
        for name in names:
            check_name(role, name)
    if given.address and len(given.server) != 1:
        fail("--address is for one --server", "", "Make the certificates of several servers one after another.", 2)
    if not 1 <= given.days <= AUTHORITY_DAYS:
        fail(f"--days is {given.days}", advice=f"Choose 1 to {AUTHORITY_DAYS}.", code=2)
    if bool(given.server or given.client) + given.list + bool(given.revoke) != 1:
        parser.error("one of these is needed: --server and --client, --list, or --revoke")
    if "$" in given.ca and not os.path.exists(given.ca):
        fail(f"--ca is {given.ca}: variables in paths are expanded by shells only", code=2)
    return given


def main(words):
    given = parse(words)
    os.umask(0o022)  # keys and folders are closed by modes of their own
    try:
        authority = Authority(os.path.expanduser(given.ca), make=bool(given.server or given.client))
        for name in given.server:
            authority.issue("server", name, [name, *given.address], given.days)
        for name in given.client:
            authority.issue("client", name, [], given.days)
        if given.list:
            authority.list()
        for name in given.revoke:
            authority.revoke(name)
        if given.revoke:
            print(f"Copy {authority.folder / 'revoked.crl'} to every server; it is read again when it changes.")
        shutil.rmtree(authority.making, ignore_errors=True)
    except OSError as error:
        fail(error.strerror or str(error), error.filename2 or error.filename or "")
    except KeyboardInterrupt:
        fail("interrupted", code=130)


if __name__ == "__main__":
    main(sys.argv[1:])
