"""Build the null CUDA beside an installed torch: ``python build.py SITE_PACKAGES``.

torch's libraries say themselves which functions they need of which library, and under
which symbol version. What ``runtime/`` and ``libraries/`` do not define becomes a stub
that notes its name. torch looks for the libraries in ``nvidia/cu13/lib``, or for CUDA
12 in ``nvidia/cuda_runtime/lib``, and not before in other folders of the machine (its
RPATH beats LD_LIBRARY_PATH), so that is where they go. The headers are beside them,
from nvidia-cuda-runtime or nvidia-cuda-runtime-cu12. Nothing is built if all sources
are older than the last build.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
GENERATED = "generated"  # the folder of stubs
# Without a symbol version a function's library is known by the beginning of its name.
UNVERSIONED = {
    "libcuda": r"cu[A-Z](?!File)",
    "libcufile": "cuFile",
    "libcurand": "curand",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libnvshmem_host": "nvshmem",
}


def main(site_packages: Path) -> None:
    """Compile every library that torch needs and the machine has not."""
    stamp = site_packages / "nvidia" / "null-cuda-built"
    sources = [path for path in HERE.rglob("*.[ch]") if path.parent.name != GENERATED]
    if is_current(stamp, [Path(__file__), *sources]):
        return
    torch_libraries = sorted((site_packages / "torch" / "lib").glob("*.so*"))
    wanted, sonames = undefined(torch_libraries)
    (runtime,) = (soname for soname in sonames if soname.startswith("libcudart.so."))
    _, _, cuda = runtime.rpartition(".")
    home = site_packages / "nvidia" / ("cuda_runtime" if cuda == "12" else f"cu{cuda}")
    build = Build(home / "lib", home / "include", runtime)
    build.runtime(wanted.pop(runtime))
    sonames.add(f"libnvJitLink.so.{cuda}")
    present = {runtime, *[library.name for library in torch_libraries]}
    for soname in sorted(sonames - present):
        build.library(soname, wanted)
    stamp.touch()


def is_current(stamp: Path, sources: Iterable[Path]) -> bool:
    """Whether the stamp of the last build is newer than all sources."""
    if not stamp.exists():
        return False
    built = stamp.stat().st_mtime_ns
    return all(source.stat().st_mtime_ns < built for source in sources)


def undefined(libraries: list[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Functions that ``libraries`` need, by symbol version, and the libraries' names."""
    wanted: dict[str, set[str]] = defaultdict(set)
    sonames: set[str] = set()
    for library in libraries:
        symbols = subprocess.run(
            ["nm", "-D", "--undefined-only", library],
            capture_output=True,
            text=True,
            check=False,
        )
        for line in symbols.stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            wanted[version.lstrip("@")].add(name)
        headers = subprocess.run(
            ["readelf", "-d", library], capture_output=True, text=True
        )
        needed = re.findall(
            r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^\]]*)\]", headers.stdout
        )
        sonames.update(needed)
    return wanted, sonames


class Build:
    """Compiles libraries into a folder.

    Args:
        out: where they go.
        include: where CUDA's headers are.
        runtime: the name of CUDA's runtime library.
    """

    def __init__(self, out: Path, include: Path, runtime: str) -> None:
        self._out = out
        self._runtime = runtime
        self._includes = ["-I", str(HERE / "runtime"), "-I", str(include)]
        self._generated = HERE / GENERATED
        self._generated.mkdir(exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def runtime(self, wanted: set[str]) -> None:
        """The runtime itself: what is not written fails with cudaErrorNotSupported."""
        sources = sorted((HERE / "runtime").glob("*.c"))
        missing = sorted(wanted - set().union(*map(self._defined, sources)))
        lines = ["int null_not_done(const char *name);"]
        for name in missing:
            lines.append(f'int {name}(void) {{ return null_not_done("{name}"); }}')
        stubs = self._generated / "cudart.c"
        stubs.write_text("\n".join(lines) + "\n")
        print(f"{self._runtime}: {len(wanted)} functions, {len(missing)} of them fail")
        self._compile(self._runtime, [*sources, stubs], version=self._runtime)

    def library(self, soname: str, wanted: dict[str, set[str]]) -> None:
        """A library above it: what is not written succeeds, and does nothing."""
        stem, _, _ = soname.partition(".so")
        version = ""
        for candidate in (soname, "NVSHMEM"):
            if candidate in wanted and is_of(candidate, stem):
                version = candidate
                break
        names = set(wanted[version]) if version else set()
        if stem in UNVERSIONED:
            names |= {name for name in wanted[""] if re.match(UNVERSIONED[stem], name)}
        source = HERE / "libraries" / f"{stem.removeprefix('lib')}.c"
        sources = [source] if source.exists() else []
        written = set().union(*map(self._defined, sources))
        lines = ["int null_library(const char *name, void *stream, int launches);"]
        for name in sorted(names - written):
            lines.append(f'int {name}(void) {{ return null_library("{name}", 0, 0); }}')
        stubs = self._generated / f"{stem}.c"
        stubs.write_text("\n".join(lines) + "\n")
        num_written = len(names & written)
        print(f"{soname}: {len(names)} functions, {num_written} of them written")
        runtime = ["-L", str(self._out), f"-l:{self._runtime}"]
        self._compile(soname, [stubs, *sources], version=version, libraries=runtime)

    def _compile(
        self,
        soname: str,
        sources: list[Path],
        version: str = "",
        libraries: list[str] | None = None,
    ) -> None:
        command = ["gcc", "-O2", "-g", "-shared", "-fPIC", "-w"]
        command += [f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", *self._includes]
        if version:  # of all functions of the library
            script = self._generated / f"{soname}.map"
            script.write_text(f"{version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        target = self._out / soname
        target.unlink(missing_ok=True)
        command += [*map(str, sources), "-o", str(target)]
        command += [*(libraries or []), "-lpthread", "-ldl"]
        subprocess.run(command, check=True)

    def _defined(self, source: Path) -> set[str]:
        """The functions that a C file defines, by the names that CUDA's headers give."""
        target = self._generated / f"{source.stem}.o"
        command = ["gcc", "-c", "-w", *self._includes, str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        command = ["nm", "--defined-only", "--extern-only", "--format=posix"]
        symbols = subprocess.run(
            [*command, str(target)], capture_output=True, text=True, check=True
        )
        return {line.split()[0] for line in symbols.stdout.splitlines()}


def is_of(version: str, stem: str) -> bool:
    """Whether symbols of ``version`` belong to the library ``stem``."""
    return version.startswith("lib") or stem == "libnvshmem_host"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
