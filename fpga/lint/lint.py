"""What v++ would refuse in the kernels, or build other hardware for than is meant, as far as clang can say.

Usage: lint.py PROJECT_ROOT [CLANG]

Over clang's syntax tree of every kernel file, compiled as Vitis HLS compiles it (C++14, without exceptions): memory from the
heap, exceptions, lambdas, virtual functions, goto, calls of what is not the kernels' own, recursion, loops of unknown
length without a trip count, variables that outlive a call, and floating-point operators (Xilinx' would flush denormals).
Then over the symbols of the object. Exit code 77: there is no clang.
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FORBIDDEN = {
    "CXXNewExpr": "memory from the heap", "CXXDeleteExpr": "memory from the heap", "CXXThrowExpr": "an exception",
    "CXXTryStmt": "an exception", "LambdaExpr": "a lambda", "GotoStmt": "goto", "CXXDynamicCastExpr": "run-time types",
    "CXXTypeidExpr": "run-time types", "GCCAsmStmt": "assembly", "VAArgExpr": "variable arguments",
    "DoStmt": "a loop that ends after its body", "CXXForRangeStmt": "a loop over a container",
}
ARITHMETIC = {"+", "-", "*", "/", "+=", "-=", "*=", "/=", "<", ">", "<=", ">=", "==", "!="}
# Of ap_uint, streams and the compiler.
KNOWN = {"read", "write", "empty", "range", "to_uint", "to_uint64", "operator=", "stream", "__builtin_clz",
         "__builtin_ctzll"}


class Lint:
    def __init__(self, path):
        self.path = path
        self.found, self.functions, self.calls = [], set(), {}

    def say(self, node, what):
        self.found.append(f"{self.path}: {self.where(node)}: {what}")

    def where(self, node):
        place = node.get("range", {}).get("begin", {})
        place = place.get("expansionLoc", place)
        return f"{self.file}:{self.line}" if "line" not in place else f"{self.file}:{place['line']}"

    file, line = "", 0

    def remember_place(self, node):
        """clang names file and line only where they change."""
        for place in (node.get("loc", {}), node.get("range", {}).get("begin", {})):
            for one in (place.get("spellingLoc", {}), place.get("expansionLoc", {}), place):
                self.file = one.get("file", self.file)
                self.line = one.get("line", self.line)

    def walk(self, node, function=None):
        if not isinstance(node, dict):
            return
        self.remember_place(node)
        kind = node.get("kind", "")
        if kind in ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXConversionDecl"):
            self.functions.add(node.get("name"))
            if any(child.get("kind") == "CompoundStmt" for child in node.get("inner", [])):
                function = (node.get("name"), node.get("type", {}).get("qualType"))
                self.calls.setdefault(function, set())
            if node.get("virtual"):
                self.say(node, "a virtual function")
        if kind in FORBIDDEN:
            self.say(node, FORBIDDEN[kind])
        if kind in ("ForStmt", "WhileStmt"):
            self.check_loop(node)
        if kind == "VarDecl" and function and node.get("storageClass") == "static":
            if not node.get("type", {}).get("qualType", "").startswith("const "):
                self.say(node, f"{node.get('name')} outlives its call")
        if kind in ("BinaryOperator", "CompoundAssignOperator") and node.get("opcode") in ARITHMETIC:
            sides = [side.get("type", {}).get("qualType", "") for side in node.get("inner", [])]
            if any(side in ("float", "double", "long double") for side in sides):
                self.say(node, "an operator of floating-point numbers")
        if kind in ("DeclRefExpr", "MemberExpr", "CXXConstructExpr"):
            other = node.get("referencedDecl", {})
            if other.get("kind") in ("FunctionDecl", "CXXMethodDecl") and function:
                self.calls[function].add((other.get("name"), other.get("type", {}).get("qualType")))
        for child in node.get("inner", []):
            self.walk(child, function)

    def check_loop(self, node):
        """The trip count stands in the text behind the loop's head, or the bound is a constant."""
        inner = node.get("inner", [])
        condition = inner[2] if node["kind"] == "ForStmt" and len(inner) > 2 else inner[0] if inner else {}
        if node["kind"] == "ForStmt" and not condition:
            return self.say(node, "a loop without a condition")
        if constant_bound(condition):
            return None
        place = node.get("range", {}).get("begin", {})
        line = place.get("line", self.line)
        text = pathlib.Path(self.file).read_text(encoding="utf-8").splitlines()[line - 1:line + 3]
        if not any("LOOP_TRIPCOUNT" in one for one in text):
            self.say(node, "a loop of unknown length without LOOP_TRIPCOUNT")
        return None

    def check_calls(self):
        for function, others in self.calls.items():
            for name, _ in others:
                if name not in self.functions and name not in KNOWN:
                    self.found.append(f"{self.path}: {function[0]} calls {name}, which is not the kernels'")
        for function in self.calls:
            if self.reaches(function, function, set()):
                self.found.append(f"{self.path}: {function[0]} calls itself")

    def reaches(self, start, wanted, seen):
        for other in self.calls.get(start, ()):
            if other == wanted:
                return True
            if other not in seen:
                seen.add(other)
                if self.reaches(other, wanted, seen):
                    return True
        return False


def constant_bound(node):
    """Whether a condition compares with a number that is known when it is compiled (maybe and with more conditions)."""
    if node.get("kind") == "BinaryOperator" and node.get("opcode") == "&&":
        return any(constant_bound(child) for child in node.get("inner", []))
    if node.get("kind") != "BinaryOperator" or node.get("opcode") not in ("<", "<=", ">", ">=", "!="):
        return False
    return constant(node["inner"][1])


def constant(node):
    if node.get("kind") in ("IntegerLiteral", "ConstantExpr", "SubstNonTypeTemplateParmExpr"):
        return True
    if node.get("kind") == "DeclRefExpr":
        # A constant has its value at hand; clang says so by the way it is used.
        return node.get("nonOdrUseReason") == "constant"
    return bool(node.get("inner")) and node.get("kind") != "MemberExpr" and all(constant(c) for c in node["inner"])


def documents(text):
    decoder = json.JSONDecoder()
    at = 0
    while True:
        at = text.find("{", at)
        if at < 0:
            return
        value, at = decoder.raw_decode(text, at)
        yield value


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    clang = sys.argv[2] if len(sys.argv) > 2 else shutil.which("clang++") or shutil.which("clang++-14")
    if not clang:
        print("no clang++: the kernels were not looked at")
        return 77
    found = []
    sources = sorted((root / "fpga/kernels").glob("*.cc"))
    assert sources, "there are kernels"
    for source in sources:
        flags = ["-std=c++14", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", f"-I{root}", f"-I{root}/fpga/lint",
                 f"-I{root}/fpga/sim", "-Wall", "-Wextra", "-Wvla", "-Wno-unknown-pragmas", "-Werror"]
        name = source.relative_to(root).as_posix()
        tree = subprocess.run([clang, *flags, "-fsyntax-only", "-Xclang", "-ast-dump=json", "-Xclang",
                               "-ast-dump-filter=smartinf", str(source)], capture_output=True, text=True, check=False)
        if tree.returncode != 0:
            found.append(f"{name}: does not compile as C++14:\n{tree.stderr}")
            continue
        lint = Lint(name)
        for document in documents(tree.stdout):
            lint.file, lint.line = str(source), 0
            lint.walk(document)
        assert lint.calls, "functions were found"
        lint.check_calls()
        found += lint.found
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "kernel.o"
            subprocess.run([clang, *flags, "-O0", "-c", str(source), "-o", str(target)], check=True)
            symbols = subprocess.run(["nm", "-u", "-C", str(target)], capture_output=True, text=True, check=True)
        for symbol in symbols.stdout.split("\n"):
            symbol = symbol.strip().removeprefix("U ").strip()
            if symbol and not symbol.startswith("hls::stream<") and not re.fullmatch(r"mem(set|cpy|move)", symbol):
                found.append(f"{name}: its object needs {symbol}")
    print("\n".join(sorted(set(found))) or "nothing that v++ is known to refuse")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
