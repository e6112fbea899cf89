"""Meters against made-up counters, and the facts of the machine the tests run on."""

from pathlib import Path

import pytest

from foredraft.bench.machine import EnergyCounter, Meter, cpu_name, find_energy_counters, memory_bytes


def add_domain(root: Path, folder: str, name: str, energy: str = "1000000") -> Path:
    path = root / folder
    path.mkdir()
    (path / "name").write_text(name + "\n")
    (path / "max_energy_range_uj").write_text("5000000\n")
    (path / "energy_uj").write_text(energy + "\n")
    return path / "energy_uj"


def test_only_readable_packages_are_counted(tmp_path: Path) -> None:
    package = add_domain(tmp_path, "intel-rapl:0", "package-0")
    add_domain(tmp_path, "intel-rapl:0:0", "core")  # part of its package
    add_domain(tmp_path, "intel-rapl:1", "package-1").unlink()  # stands for: permission denied
    add_domain(tmp_path, "dtpm", "package-9")
    assert find_energy_counters(tmp_path) == [EnergyCounter(package, 5_000_000)]


def test_no_counters_no_joules(tmp_path: Path) -> None:
    assert find_energy_counters(tmp_path / "missing") == []
    meter = Meter()
    assert meter.between(meter.read(), meter.read()).joules is None


@pytest.mark.parametrize(("end", "joules"), [("1500000", 0.5), ("500000", 4.5)])
def test_joules_survive_a_counter_that_starts_over(tmp_path: Path, end: str, joules: float) -> None:
    path = add_domain(tmp_path, "intel-rapl:0", "package-0")
    meter = Meter(find_energy_counters(tmp_path))
    begin = meter.read()
    path.write_text(end)
    assert meter.between(begin, meter.read()).joules == pytest.approx(joules)


def test_processor_time_counts_work(tmp_path: Path) -> None:
    meter = Meter()
    begin = meter.read()
    while meter.between(begin, meter.read()).cpu_s < 0.02:
        sum(range(1000))
    spent = meter.between(begin, meter.read())
    assert spent.wall_s >= spent.cpu_s / 2 > 0


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    assert cpu_name(path) == "Example 9000"
    assert cpu_name(tmp_path / "missing")
    assert memory_bytes() > 1 << 28
