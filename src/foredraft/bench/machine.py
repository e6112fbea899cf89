"""What the figures were measured on, and the meters: clock, processor time, energy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foredraft.models.gguf import load_core

POWERCAP = Path("/sys/class/powercap")
#: Larger than any cache, small enough for a laptop.
BANDWIDTH_BYTES = 1 << 29
BANDWIDTH_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that figures depend on. `read_gb_per_s`: measured, plain reading with `threads` threads."""

    cpu: str
    num_cpus: int  # in the machine
    threads: int  # that we may use: affinity and cgroup quota
    kernel_set: str
    read_gb_per_s: float
    memory_gb: float
    system: str
    joules: bool  # can energy be read?
    versions: Mapping[str, str] = field(default_factory=dict)


def describe_machine(threads: int | None = None, packages: Sequence[str] = ()) -> Machine:
    """Ask and measure, about half a second. `packages`: peers whose versions matter too. Raises NativeCoreError."""
    core = load_core()
    threads = core.default_threads() if threads is None else threads
    speeds = core.time_reading(BANDWIDTH_BYTES, threads, BANDWIDTH_REPEATS)
    return Machine(
        cpu=cpu_name(),
        num_cpus=os.cpu_count() or 1,
        threads=threads,
        kernel_set=os.environ.get("FOREDRAFT_KERNELS") or core.kernel_sets()[0],
        read_gb_per_s=round(max(speeds) / 1e9, 2),
        memory_gb=round(memory_bytes() / 1e9, 1),
        system=f"{platform.system()} {platform.release()}",
        joules=bool(find_energy_counters()),
        versions={"python": platform.python_version(), **_versions(("foredraft", "numpy", *packages))},
    )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name for people; the architecture where the system does not tell."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from its sources"
    return found


@dataclass(frozen=True, slots=True)
class EnergyCounter:
    """A RAPL domain: micro-joules since some moment, starting over at `range_uj`."""

    path: Path
    range_uj: int


def find_energy_counters(root: Path = POWERCAP) -> list[EnergyCounter]:
    """The processor packages whose energy this user may read; on most systems only root may, in a guest nobody."""
    counters = []
    for folder in sorted(root.glob("*-rapl:*")):
        try:
            if not (folder / "name").read_text().startswith("package"):
                continue
            counter = EnergyCounter(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
            counter.path.read_text()
        except (OSError, ValueError):
            continue
        counters.append(counter)
    return counters


@dataclass(frozen=True, slots=True)
class Spent:
    """What a stretch of work took. `cpu_s`: of all threads of this process. `joules`: of all processor packages."""

    wall_s: float
    cpu_s: float
    joules: float | None


@dataclass(frozen=True, slots=True)
class Reading:
    wall_s: float
    cpu_s: float
    energy_uj: tuple[int, ...]  # one a counter


class Meter:
    """Reads the clocks, and the energy counters where there are any."""

    def __init__(self, counters: Sequence[EnergyCounter] = ()) -> None:
        self._counters = tuple(counters)

    def read(self) -> Reading:
        energy = tuple(int(counter.path.read_text()) for counter in self._counters)
        return Reading(time.perf_counter(), time.process_time(), energy)

    def between(self, begin: Reading, end: Reading) -> Spent:
        joules = None
        if self._counters:
            pairs = zip(self._counters, begin.energy_uj, end.energy_uj, strict=True)
            joules = sum((last - first) % counter.range_uj for counter, first, last in pairs) / 1e6
        return Spent(end.wall_s - begin.wall_s, end.cpu_s - begin.cpu_s, joules)


def command_line() -> str:
    """This process's own command, for the record."""
    return shlex.join(["foredraft", *sys.argv[1:]])
