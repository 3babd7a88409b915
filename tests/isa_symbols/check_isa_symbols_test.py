"""The check must see a leak when there is one: compiles small files with and without, and looks at its verdict."""

import argparse
import pathlib
import subprocess
import sys
import tempfile

CASES = {  # source -> whether it leaks
    "namespace isa_v3 { int twice(int x) { return 2 * x; } }": False,
    "namespace isa_v3 { static int one() { return 1; } int two() { return one() + 1; } }": False,
    "int twice(int x) { return 2 * x; }": True,
    "namespace isa_v4 { int twice(int x) { return 2 * x; } }": True,
    "namespace isa_v3amx { int twice(int x) { return 2 * x; } }": True,
    "inline int one() { return 1; } namespace isa_v3 { int (*get())() { return one; } }": True,
    "template <class T> T one() { return 1; } namespace isa_v3 { int (*get())() { return one<int>; } }": True,
    "inline int shared = 1; namespace isa_v3 { int* get() { return &shared; } }": True,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--compiler", default="c++")
    arguments = parser.parse_args()
    check = pathlib.Path(__file__).with_name("check_isa_symbols.py")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (source, leaks) in enumerate(CASES.items()):
            path = pathlib.Path(folder) / f"case{number}.cpp"
            path.write_text(source + "\n")
            made = path.with_suffix(".o")
            subprocess.run([arguments.compiler, "-std=c++20", "-O0", "-c", path, "-o", made], check=True)
            verdict = subprocess.run([sys.executable, check, "--nm", arguments.nm, f"v3={made}"], capture_output=True)
            if verdict.returncode != int(leaks):
                wrong += 1
                print(f"exit {verdict.returncode}, leaks: {leaks}: {source}", file=sys.stderr)
    print(f"{len(CASES)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
