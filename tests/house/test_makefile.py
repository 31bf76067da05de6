"""The Makefile's set-up, with a stand-in for Python that writes down what it is asked to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-build.lock")

# Answers what the Makefile asks of `python3` and of the environment's own `python`, and logs every installation.
STAND_IN = """#!/bin/sh
case "$*" in
    -c*) echo 3.11 ;;
    "-m venv"*) [ -z "$NO_VENV" ] || exit 1; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m pip --version") echo "pip 1 from $PWD/.venv (python 3.11)" ;;
    "-m pip config list") printf '%s' "$PIP_SETTINGS" ;;
    "-m uv --version") [ -z "$NO_UV" ] ;;
    "-m pip install"*|"-m uv pip install"*) echo "$* index=$UV_DEFAULT_INDEX extra=$UV_INDEX cert=$SSL_CERT_FILE" >> log ;;
    "-m app serve") echo serving ;;
    *) echo "unexpected: $*" >&2; exit 64 ;;
esac
"""


class Checkout:
    """A directory with the Makefile, the locks and the stand-in, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkout"
        self.directory.mkdir()
        for name in ("Makefile", "pyproject.toml", *LOCKS):
            shutil.copy(ROOT / name, self.directory)
        self.programs = directory / "bin"
        self.programs.mkdir()
        for name in (
            "sh",
            "cat",
            "cksum",
            "getconf",
            "grep",
            "sed",
            "tail",
            "tr",
            "printenv",
            "touch",
            "mkdir",
            "rm",
            "cp",
        ):
            (self.programs / name).symlink_to(shutil.which(name) or name)

    def add_python(self) -> None:
        python = self.programs / "python3"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run make with no HOME and only the environment given."""
        return subprocess.run(
            [shutil.which("make") or "make", "-s", *arguments],
            cwd=self.directory,
            env={"PATH": str(self.programs), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def installed(self) -> list[str]:
        log = self.directory / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_without_a_suitable_python_make_says_what_is_needed(checkout: Checkout):
    answer = checkout.make("run")
    assert answer.returncode != 0
    assert "Python 3.11 or newer is needed and none was found on PATH" in answer.stderr
    assert "make PYTHON=/path/to/python3.11 run" in answer.stderr


def test_without_the_venv_module_make_names_the_debian_package_and_leaves_nothing(checkout: Checkout):
    checkout.add_python()
    answer = checkout.make("run", NO_VENV="1")
    assert answer.returncode != 0
    assert "apt-get install python3-venv" in answer.stderr
    assert not (checkout.directory / ".venv").exists()


def test_the_first_run_installs_from_the_hash_locks_and_the_second_installs_nothing(checkout: Checkout):
    checkout.add_python()
    first = checkout.make("run")
    assert (first.returncode, first.stderr, first.stdout.splitlines()[-1]) == (0, "", "serving")
    none = "index= extra= cert="
    assert checkout.installed() == [
        f"-m pip install -qq --require-hashes -r requirements-build.lock {none}",
        f"-m uv pip install --quiet --python .venv/bin/python --require-hashes -r requirements.lock {none}",
        f"-m pip install -qq --no-deps --no-build-isolation --no-index --editable . {none}",
    ]
    second = checkout.make("run")
    assert (second.returncode, second.stdout) == (0, "serving\n")
    assert checkout.installed() == []


def test_what_serves_for_the_tests_serves_for_the_service(checkout: Checkout):
    checkout.add_python()
    assert checkout.make("setup").returncode == 0
    assert any("-r requirements-dev.lock" in line for line in checkout.installed())
    assert checkout.make("run").stdout == "serving\n"
    assert checkout.installed() == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-build.lock", "pyproject.toml"])
def test_a_change_of_what_is_installed_installs_again(checkout: Checkout, name: str):
    checkout.add_python()
    assert checkout.make("run").returncode == 0
    checkout.installed()
    with (checkout.directory / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.make("run").returncode == 0
    assert len(checkout.installed()) == 3


def test_a_touched_but_equal_lock_installs_nothing(checkout: Checkout):
    checkout.add_python()
    assert checkout.make("run").returncode == 0
    checkout.installed()
    os.utime(checkout.directory / "requirements.lock")
    assert checkout.make("run").returncode == 0
    assert checkout.installed() == []


def test_without_uv_pip_installs_the_same_lock(checkout: Checkout):
    checkout.add_python()
    assert checkout.make("run", NO_UV="1").returncode == 0
    assert [line for line in checkout.installed() if "uv pip" in line or "-r requirements.lock" in line] == [
        "-m pip install -qq --require-hashes -r requirements.lock index= extra= cert="
    ]


def test_uv_gets_the_index_and_the_certificate_that_pip_is_configured_for(checkout: Checkout):
    checkout.add_python()
    settings = (
        ":env:.cert='/certificates/of-the-environment.pem'\n"
        "global.cert='/certificates/of-the-file.pem'\n"
        "global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'\n"
        "global.index-url='https://index.example/simple'\n"
    )
    assert checkout.make("run", PIP_SETTINGS=settings).returncode == 0
    assert checkout.installed()[1].partition("requirements.lock ")[2] == (
        "index=https://index.example/simple extra=https://one.example/simple https://two.example/simple "
        "cert=/certificates/of-the-environment.pem"
    )


def test_nothing_in_the_makefile_or_the_locks_names_a_host(checkout: Checkout):
    for name in ("Makefile", *LOCKS):
        text = (checkout.directory / name).read_text()
        assert [line for line in text.splitlines() if "://" in line or "index-url " in line] == [], name
