"""The facts of the machine and the table of figures."""

import json
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One line of the table. `met` is None where there is no aim."""

    name: str
    measured: str
    floor: str
    ratio: str
    aim: str
    met: bool | None = None


def machine_facts(data_dir: Path) -> dict[str, str]:
    """Return what decides about the figures: processor, cores, load, kernel, Python, file system, versions."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    load = os.getloadavg()
    return {
        "processor": f"{model}, {os.cpu_count()} cores, load {load[0]:.1f} at the start",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
        "data directory": f"{_file_system(data_dir)}, {shutil.disk_usage(data_dir).free // 10**9} GB free",
        "packages": ", ".join(f"{name} {version(name)}" for name in ("fastapi", "uvicorn", "sqlalchemy", "uvloop")),
    }


def table(figures: list[Figure]) -> str:
    rows = [("figure", "measured", "floor", "ratio", "aim", "")]
    verdicts: dict[bool | None, Literal["met", "MISSED", ""]] = {True: "met", False: "MISSED", None: ""}
    rows += [(f.name, f.measured, f.floor, f.ratio, f.aim, verdicts[f.met]) for f in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths).rstrip())
    return "\n".join(lines)


def as_json(facts: dict[str, str], figures: list[Figure]) -> str:
    return json.dumps({"machine": facts, "figures": [asdict(figure) for figure in figures]}, indent=2)


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def _file_system(path: Path) -> str:
    best, kind = "", "?"
    for line in _lines("/proc/self/mounts"):
        _, mount, file_system, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, file_system
    return kind
