"""Fails when an object built for one CPU instruction level defines a symbol that the linker could merge with another's.

Such a symbol is weak, or global without its level's namespace (isa_v3): whichever copy the linker keeps serves every
caller, so a machine without AVX-512 could be handed the AVX-512 copy of std::min.
"""

import argparse
import subprocess
import sys

MERGED_KINDS = {"W", "w", "V", "v", "u"}
# Data without a level: the address of the C++ runtime's handler, which sanitizer builds refer to.
HARMLESS = {"DW.ref.__gxx_personality_v0"}


def defined_symbols(nm: str, path: str) -> list[tuple[str, str]]:
    """(kind, demangled name) of every symbol that the object defines."""
    listing = subprocess.run([nm, "--demangle", "--defined-only", path], capture_output=True, text=True, check=True)
    symbols = []
    for line in listing.stdout.splitlines():
        _, kind, name = line.split(" ", 2)
        symbols.append((kind, name))
    return symbols


def leaks(nm: str, isa: str, path: str) -> list[str]:
    """What is wrong with the object, one line a symbol."""
    found = []
    namespace = f"isa_{isa}"
    spellings = (f"{namespace}::", f"{len(namespace)}{namespace}")  # the second inside names that sanitizers derive
    for kind, name in defined_symbols(nm, path):
        if name in HARMLESS:
            continue
        if kind in MERGED_KINDS:
            found.append(f"{path}: weak symbol ({kind}): {name}")
        elif kind.isupper() and not any(spelling in name for spelling in spellings):
            found.append(f"{path}: global symbol outside namespace {namespace}: {name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("objects", nargs="*", help="LEVEL=PATH, e.g. v3=rms_norm_cpu.o")
    arguments = parser.parse_args()
    found = []
    for item in arguments.objects:
        isa, path = item.split("=", 1)
        found += leaks(arguments.nm, isa, path)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        cure = "declare it KP_PRIMITIVE or static, and export only from KP_ISA_NAMESPACE (cpu/isa.h)"
        print(f"cure: {cure}", file=sys.stderr)
    if not arguments.objects:
        print("no objects given", file=sys.stderr)
        return 2
    print(f"{len(arguments.objects)} objects, {len(found)} leaks")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
