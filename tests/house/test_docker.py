"""What can be said about the image without a Docker engine: its sources exist, its packages do, its settings are ours."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from app.settings import PREFIX, unknown_variables

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
BUILT = [name for name, service in SERVICES.items() if "build" in service]


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE.splitlines() if line.startswith(name + " ")]


def copied_sources() -> list[str]:
    sources = []
    for arguments in instructions("COPY"):
        words = shlex.split(arguments)
        if not words[0].startswith("--from"):
            sources += words[:-1]
    return sources


def volumes_of(name: str) -> set[str]:
    """Return the named volumes of a service of the compose file."""
    mounted = (volume.partition(":")[0] for volume in SERVICES[name].get("volumes", []))
    return {volume for volume in mounted if not volume.startswith("./")}


def test_every_copied_source_exists_and_reaches_the_build():
    let_through = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert copied_sources() != []
    assert [source for source in copied_sources() if not (ROOT / source).exists()] == []
    assert set(copied_sources()) == let_through


def test_every_debian_package_of_the_image_exists():
    words = " ".join(instructions("RUN"))
    packages = [
        word
        for listed in re.findall(r"apt-get install ([^&]+)", words)
        for word in listed.split()
        if not word.startswith("-")
    ]
    assert {"bubblewrap", "tini"} <= set(packages)
    if shutil.which("apt-cache") is None:
        pytest.skip("needs apt-cache to look packages up")
    known = subprocess.run(
        ["apt-cache", "pkgnames"], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout.split()
    if len(known) < 10_000:
        pytest.skip("needs Debian's package lists (apt-get update)")
    assert [package for package in packages if package not in set(known)] == []


def test_the_image_runs_as_a_user_without_privileges_behind_an_init():
    assert instructions("USER") == ["app"]
    assert instructions("ENTRYPOINT") == ['["tini", "--", "toolcrib"]']
    assert instructions("VOLUME") == ["/data"]
    assert len(instructions("HEALTHCHECK")) == 1


def test_the_lock_of_the_image_holds_what_every_role_needs():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["distributed"]
    assert instructions("RUN")[1].endswith("--require-hashes -r requirements.lock")
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert {re.split(r"[<>=\[]", requirement)[0] for requirement in extra} - locked == set()


def test_settings_of_image_and_compose_file_are_settings_of_the_service():
    named = dict.fromkeys(re.findall(rf"{PREFIX}[A-Z_]+", DOCKERFILE), "")
    for service in SERVICES.values():
        named |= service.get("environment", {})
    assert unknown_variables({name: value for name, value in named.items() if name.startswith(PREFIX)}) == []


def test_compose_asks_for_the_api_key_and_the_password():
    assert SERVICES["postgres"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    # The same for all, or a key that one process knows is refused by another.
    for name in BUILT:
        assert SERVICES[name]["environment"]["TOOLCRIB_API_KEY"].startswith("${TOOLCRIB_API_KEY:?"), name
        assert "${POSTGRES_PASSWORD:?" in SERVICES[name]["environment"]["TOOLCRIB_DATABASE_URL"], name


def test_compose_waits_for_a_healthy_database_and_keeps_its_data():
    for name in BUILT:
        assert SERVICES[name]["depends_on"] == {"postgres": {"condition": "service_healthy"}}, name
    assert [name for name, service in SERVICES.items() if "healthcheck" not in service] == []
    assert set().union(*map(volumes_of, SERVICES)) == set(COMPOSE["volumes"])
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert set(ports) == {"127.0.0.1:8080:8080"}


def test_without_a_profile_compose_starts_one_service_and_its_database():
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"toolcrib", "postgres"}
    assert set(SERVICES["toolcrib"]["environment"]) & {"TOOLCRIB_BACKEND", "TOOLCRIB_ROLE"} == set()


def test_the_proxy_of_the_profile_scale_brings_two_api_processes_two_workers_and_not_the_one_service():
    assert {name for name, service in SERVICES.items() if service.get("profiles") == ["scale"]} == {
        "proxy",
        "api-1",
        "api-2",
        "worker-1",
        "worker-2",
    }
    assert set(SERVICES["proxy"]["depends_on"]) == {"api-1", "api-2", "worker-1", "worker-2"}
    assert {it["condition"] for it in SERVICES["proxy"]["depends_on"].values()} == {"service_healthy"}
    for name in ("api-1", "api-2"):
        assert (SERVICES[name]["environment"]["TOOLCRIB_ROLE"], volumes_of(name)) == ("api", set())
    for name in ("worker-1", "worker-2"):
        assert SERVICES[name]["command"] == ["worker"]
        assert SERVICES[name]["environment"]["TOOLCRIB_ADVERTISE_URL"] == f"http://{name}:8080"
        assert "ports" not in SERVICES[name]
    for name in ("api-1", "api-2", "worker-1", "worker-2"):
        assert SERVICES[name]["environment"]["TOOLCRIB_BACKEND"] == "distributed"
    assert "TOOLCRIB_HOST=0.0.0.0" in DOCKERFILE
    # A volume is a node: no two workers share one, and the one service's goes on to be served.
    assert len(volumes_of("worker-1") | volumes_of("worker-2")) == 2
    assert volumes_of("toolcrib") < volumes_of("worker-1") | volumes_of("worker-2")


def test_the_proxy_has_the_settings_of_the_operations_page_and_knows_both_api_processes():
    def settings_of(text: str) -> set[str]:
        [location] = re.findall(r"location / \{\n(.*?)\}", text, re.DOTALL)
        return {line.partition("#")[0].strip() for line in location.splitlines()} - {""}

    mounted = [volume for volume in SERVICES["proxy"]["volumes"] if volume.startswith("./")]
    assert mounted == ["./deploy/nginx.conf:/etc/nginx/nginx.conf:ro"]
    file = (ROOT / "deploy" / "nginx.conf").read_text()
    page = settings_of((ROOT / "docs" / "operations.md").read_text())
    assert page - settings_of(file) == {"proxy_set_header Host $host;"}  # there the port is the standard one
    assert set(re.findall(r"^\s*server (\S+):8080 resolve;", file, re.MULTILINE)) == {"api-1", "api-2"}


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose (Debian has it)")
@pytest.mark.parametrize("profile", [[], ["--profile", "scale"]], ids=["plain", "scale"])
def test_docker_compose_takes_the_file(profile: list[str]):
    checked = subprocess.run(
        ["docker-compose", *profile, "config", "--quiet"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "TOOLCRIB_API_KEY": "key", "POSTGRES_PASSWORD": "password"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_wheel_holds_the_package_and_its_migrations(tmp_path: Path):
    pytest.importorskip("hatchling", reason="needs the build backend (make setup)")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = {
        path.relative_to(ROOT).as_posix()
        for top in ("app", "migrations")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == tracked
