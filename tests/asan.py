"""Runs the unit tests with a compiled form that AddressSanitizer and UBSan watch over.

`python tests/asan.py` builds `_speed/_fast.c` with both, beside a copy of the package, and runs `tests/unit` and the
fuzzer of the two forms with that; arguments go to pytest instead of `tests/unit`. It fails if a test does, if there is
anything in the sanitizers' reports, or if there is no compiler that has them: it never passes without having looked.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)

ROOT = Path(__file__).parent.parent
FLAGS = ("-shared", "-fPIC", "-g", "-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-Wall", "-Werror")
FUZZED = (("--seconds", "20"), ("--seconds", "20", "--collect"))
# It needs a new object at the address of a dead one, which a sanitizer keeps from happening for a long time.
RECYCLED = "tests/unit/test_canonical.py::test_identities_are_never_recycled"
WHICH = "import stampede_guard._speed.forms as forms; print(forms.is_compiled and forms._fast.__file__)"


class CannotWatchError(Exception):
    """Nothing can be looked at on this machine; the text says why."""


def compiler() -> str:
    """Return the path of a C compiler.

    Raises:
        CannotWatchError: there is none.
    """
    for name in (os.environ.get("CC"), "gcc", "cc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise CannotWatchError("there is no C compiler: install gcc, or say which in CC")


def runtime(compile_with: str) -> str:
    """Return the path of AddressSanitizer's library, which has to be there before Python is.

    Raises:
        CannotWatchError: the compiler has none.
    """
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so"):
        asked = [compile_with, f"-print-file-name={name}"]
        found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        if found.is_absolute():
            return str(found.resolve())
    raise CannotWatchError(f"{compile_with} comes without AddressSanitizer: install libasan")


def build(folder: Path, compile_with: str) -> Path:
    """Copy the package to *folder* and compile its C part there; return the library."""
    package = folder / "stampede_guard"
    shutil.copytree(ROOT / "src/stampede_guard", package, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    library = package / f"_speed/_fast{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run([compile_with, *FLAGS, include, str(package / "_speed/_fast.c"), "-o", str(library)], check=True)
    return library


def watch(arguments: list[str], folder: Path) -> list[str]:
    """Run everything; return what went wrong."""
    compile_with = compiler()
    library = build(folder, compile_with)
    reports = folder / "reports"
    reports.mkdir()
    options = f"log_path={reports}/report:print_stacktrace=1"
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime(compile_with),
        "PYTHONPATH": str(folder),
        "PYTHONMALLOC": "malloc",  # the interpreter's own allocator would hide what was freed
        "ASAN_OPTIONS": f"{options}:detect_leaks=0",  # what lives as long as the process is no leak
        "UBSAN_OPTIONS": options,
    }
    environment.pop("STAMPEDE_GUARD_PURE", None)
    used = subprocess.run([sys.executable, "-c", WHICH], env=environment, capture_output=True, text=True, check=False)
    if used.stdout.strip() != str(library):
        return [f"not the watched build was used, but {used.stdout.strip()!r}\n{used.stderr}"]
    fuzzer = str(ROOT / "tests/fuzz_forms.py")
    options = ["-q", "-p", "no:cacheprovider", "--numprocesses=2", "--deselect", RECYCLED]
    pytest = ["-m", "pytest", *options, *(arguments or ["tests/unit"])]
    wrong: list[str] = []
    for command in (*([fuzzer, *each] for each in FUZZED), pytest):
        ended = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, check=False)
        if ended.returncode:
            wrong.append(f"exit code {ended.returncode}: python {' '.join(command)}")
    return wrong + [report.read_text() for report in sorted(reports.iterdir())]


def main() -> int:
    """Watch, and say what came of it."""
    with TemporaryDirectory(prefix="stampede_guard_asan_") as folder:
        try:
            wrong = watch(sys.argv[1:], Path(folder))
        except CannotWatchError as reason:
            say(f"Nothing was watched: {reason}")
            return 2
    if wrong:
        say("\n\n".join(wrong))
        return 1
    say("The sanitizers report nothing.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
