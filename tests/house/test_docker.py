"""What can be said about the image without a Docker engine: its sources exist, its packages do, its settings are ours."""

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

from app.settings import PREFIX, Settings, variable

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
KNOWN = {variable(field) for field in Settings.model_fields}


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE.splitlines() if line.startswith(name + " ")]


def copied_sources() -> list[str]:
    sources = []
    for arguments in instructions("COPY"):
        words = shlex.split(arguments)
        if not words[0].startswith("--from"):
            sources += words[:-1]
    return sources


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
    named = set(re.findall(rf"{PREFIX}[A-Z_]+", DOCKERFILE)) | set(COMPOSE["services"]["toolcrib"]["environment"])
    assert named - KNOWN == set()


def test_compose_asks_for_the_api_key_and_the_password():
    service, postgres = COMPOSE["services"]["toolcrib"], COMPOSE["services"]["postgres"]
    assert service["environment"]["TOOLCRIB_API_KEY"].startswith("${TOOLCRIB_API_KEY:?")
    assert postgres["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    assert "${POSTGRES_PASSWORD:?" in service["environment"]["TOOLCRIB_DATABASE_URL"]


def test_compose_waits_for_a_healthy_database_and_keeps_its_data():
    services = COMPOSE["services"]
    assert services["toolcrib"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert [name for name, service in services.items() if "healthcheck" not in service] == []
    assert {volume.partition(":")[0] for service in services.values() for volume in service["volumes"]} == set(
        COMPOSE["volumes"]
    )
    assert all(not port.startswith("0.0.0.0") for service in services.values() for port in service.get("ports", []))


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
