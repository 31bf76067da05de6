"""What settings say, made: directories, accounts, the database, bounds, and what holds commands."""

import hashlib
import math
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from app.domain.ids import new_id
from app.domain.node import Process
from app.errors import ConfigurationError
from app.sandbox.account import Account, acts_as_others, find_account, obstacle, require_power_to_act
from app.sandbox.base import Sandbox, Tier
from app.sandbox.file_locks import FileLocks
from app.sandbox.limits import CommandLimits, CommandPolicy, memory_share
from app.sandbox.namespace import find_bwrap
from app.sandbox.programs import provide
from app.sandbox.refused import RefusedSandbox
from app.sandbox.ripgrep import installed_ripgrep
from app.sandbox.selection import SandboxMeans, select_sandbox
from app.services.request_rates import BURST_SECONDS, Rate, RequestRates
from app.settings import Settings, variable
from app.storage.base import SchemaTooNew, StorageError
from app.storage.process_lock import node_of
from app.storage.sql.jobs import JobQueue
from app.storage.sql.storage import SqlStorage

# Workspaces of a service that is root and was started in a directory nobody else can reach.
ELSEWHERE: Final = Path("/var/lib/toolcrib")

_log = structlog.get_logger(__name__)


def make_data_dir(settings: Settings) -> None:
    """Make the data directory, and keep what is in it to this process's user: others may pass through it."""
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings.database_url is None:
            database_file(settings).touch(mode=0o600)  # the database makes its other files like this one
        for entry in settings.data_dir.iterdir():
            if entry.is_file() and not entry.is_symlink():
                entry.chmod(entry.stat().st_mode & 0o700)
    except OSError as error:
        raise ConfigurationError(
            f"{variable('data_dir')}: {settings.data_dir} cannot be made: {error.strerror}."
        ) from None


def database_file(settings: Settings) -> Path:
    return settings.data_dir / "toolcrib.db"


def open_file_locks(settings: Settings) -> FileLocks:
    """Return the locks that processes which share the data directory change files under.

    Raises:
        ConfigurationError: the file system of the data directory knows none.
    """
    path = settings.data_dir / "file-locks"
    try:
        return FileLocks(path)
    except OSError as error:
        raise ConfigurationError(
            f"{variable('data_dir')}: {path} cannot be locked, so changes of files could not be kept apart from those "
            f"of other processes: {error.strerror}."
        ) from None


def account_of_settings(settings: Settings) -> Account | None:
    """Return the account that owns managed workspaces; None when that is this process's own user.

    Raises:
        ConfigurationError: it cannot be the one that is asked for.
    """
    name = variable("run_as")
    if not acts_as_others() and "run_as" not in settings.model_fields_set:
        return None
    try:
        account = find_account(settings.run_as)
    except ValueError as error:
        raise ConfigurationError(f"{name}={settings.run_as} is wrong: {error}.") from None
    if acts_as_others():
        require_power_to_act(account)
        return account
    if account.uid != os.geteuid():
        raise ConfigurationError(
            f"{name}={settings.run_as} cannot be had: the service was started as user {os.geteuid()}, and only root "
            "can act as others. Leave it unset, or start the service as root."
        )
    return None


def place_of_workspaces(settings: Settings, account: Account | None) -> Path:
    """Return the directory workspaces are made in: the data directory, or one elsewhere when that cannot be reached.

    Raises:
        ConfigurationError: the account cannot reach the data directory that was asked for.
    """
    data_dir = settings.data_dir
    if account is None:
        return data_dir
    # What is in it keeps to itself; passing through is what an account needs.
    data_dir.chmod(stat.S_IMODE(data_dir.stat().st_mode) | 0o011)
    closed = obstacle(data_dir, account)
    if closed is None:
        return data_dir
    place = ELSEWHERE / hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    if "data_dir" not in settings.model_fields_set:
        # A checkout below the home of root: it shall serve as it is, without anybody opening that home.
        with suppress(OSError):
            for directory in (ELSEWHERE, place):
                directory.mkdir(mode=0o711, parents=True, exist_ok=True)
                directory.chmod(0o711)
            if obstacle(place, account) is None:
                _log.warning("workspaces_elsewhere", directory=str(place), closed=str(closed), user=account.uid)
                return place
    raise ConfigurationError(
        f"{variable('data_dir')}: files are touched and commands run as user {account.uid} ({variable('run_as')}), who "
        f"may not pass {closed} on the way to {data_dir}: choose a data directory elsewhere, such as {ELSEWHERE}, or "
        f"let others pass (chmod o+x {closed})."
    )


def sandbox_means(settings: Settings, most: CommandLimits, account: Account | None, place: Path) -> SandboxMeans:
    """Return what sandboxes are made with, programs where the account can start them.

    Raises:
        ConfigurationError: a program cannot be copied to such a place.
    """
    bwrap = find_bwrap(None if settings.bwrap is None else str(settings.bwrap))
    ripgrep = installed_ripgrep()
    try:
        provided = [
            None if program is None else Path(provide(program, account, place / "programs"))
            for program in (bwrap, ripgrep)
        ]
    except OSError as error:
        raise ConfigurationError(
            f"programs cannot be copied to {place}, where user {account and account.uid} can start them: "
            f"{error.strerror}."
        ) from None
    return SandboxMeans(
        place,
        settings.sandbox_readable,
        bwrap=provided[0],
        ripgrep=provided[1],
        most=most,
        account=account,
        hidden=() if settings.data_dir == place else (settings.data_dir,),
    )


def open_jobs(settings: Settings) -> JobQueue | None:
    """Return where batches for other nodes wait; None when they are refused.

    Raises:
        ConfigurationError: what it takes is not installed.
    """
    if settings.backend == "local" or settings.direct_url is None:
        return None
    try:
        return JobQueue(settings.direct_url)
    except ConfigurationError as error:
        raise ConfigurationError(sentence(f"{variable('backend')}=distributed cannot be had", error)) from None


def this_process(settings: Settings, address: str | None) -> Process:
    node_id = None if settings.role == "api" else node_of(settings.data_dir)
    return Process(new_id("proc"), node_id, settings.role, settings.advertise_url or address)


def open_storage(settings: Settings, jobs: JobQueue | None = None) -> SqlStorage:
    url = settings.database_url
    try:
        storage = SqlStorage(
            database_file(settings) if url is None else url.get_secret_value(),
            jobs=jobs,
            direct=None if settings.database_direct_url is None else settings.direct_url,
        )
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(sentence(f"{variable('database_url')} is wrong", error)) from None
    try:
        storage.migrate()
    except SchemaTooNew as error:
        storage.close()
        raise ConfigurationError(sentence("the start is refused", error)) from None
    except StorageError as error:
        storage.close()
        where = variable("data_dir") if url is None else variable("database_url")
        raise ConfigurationError(sentence(f"the database of {where} cannot be used", error)) from None
    return storage


def sentence(what: str, error: Exception) -> str:
    return f"{what}: {' '.join(str(error).split()).removesuffix('.')}."


def request_rates(settings: Settings) -> RequestRates:
    requests = failures = None
    if settings.rate_limit > 0:
        burst = settings.rate_burst or math.ceil(settings.rate_limit * BURST_SECONDS)
        requests = Rate(settings.rate_limit, burst)
    if settings.auth_failures_per_minute > 0:
        failures = Rate(settings.auth_failures_per_minute / 60, settings.auth_failures_per_minute)
    return RequestRates(requests, failures)


def command_policy(settings: Settings) -> CommandPolicy:
    memory = settings.command_memory_bytes
    return CommandPolicy(
        CommandLimits(
            processes=settings.command_processes,
            open_files=settings.command_open_files,
            file_bytes=settings.command_file_bytes,
            cpu_seconds=settings.command_cpu_seconds,
            memory_bytes=memory_share() if memory is None else memory,
            tmp_bytes=settings.command_tmp_bytes,
        ),
        allow_network=settings.allow_network,
        min_free_bytes=settings.min_free_bytes,
    )


async def open_sandbox(settings: Settings, means: SandboxMeans) -> Sandbox:
    """Return the strongest sandbox that holds, or the one that is asked for.

    Raises:
        ConfigurationError: the one that is asked for does not hold.
    """
    if settings.role == "api":
        return RefusedSandbox(f"this process runs nothing ({variable('role')}=api)")
    tiers: Sequence[Tier] = ("namespace", "landlock", "process")
    if settings.sandbox != "auto":
        tiers = (settings.sandbox,)
    elif not settings.loopback:
        tiers = ("namespace", "landlock")
    selection = await select_sandbox(tiers, means)
    for tier, reason in selection.refused.items():
        if settings.sandbox != "auto":
            raise ConfigurationError(f"{variable('sandbox')}={tier} cannot be had here: {reason.removesuffix('.')}.")
        _log.warning("sandbox_not_available", tier=tier, reason=reason)
    sandbox = selection.sandbox
    if sandbox is None:
        _log.warning("commands_refused", host=settings.host)
        return RefusedSandbox(
            "commands do not run here: nothing on this machine isolates them, and this service can be reached from "
            f"other machines. Its operator can read why in the log, or allow it with {variable('sandbox')}=process"
        )
    report = sandbox.report
    if report.tier == "process":
        _log.warning("commands_are_not_isolated", missing=list(report.missing))
    return sandbox
