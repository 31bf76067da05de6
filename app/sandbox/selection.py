"""Choosing a tier: the strongest one that holds on this machine, found out by trying it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.sandbox import landlock, seccomp
from app.sandbox.account import Account, acts_as_others
from app.sandbox.base import Tier
from app.sandbox.confinement import Confinement
from app.sandbox.landlock import Landlock
from app.sandbox.limits import UNLIMITED, CommandLimits
from app.sandbox.local import LocalSandbox
from app.sandbox.namespace import Namespace, find_bwrap
from app.sandbox.probe import find_gaps
from app.sandbox.ripgrep import installed_ripgrep


@dataclass(frozen=True, slots=True)
class SandboxMeans:
    """What tiers are made with.

    `private` is the directory that no command may see, and in which tiers are tried; `hidden` are further ones.
    `readable` are those that all may see besides the system's. `bwrap` is the bubblewrap to use instead of the one that
    is found, `ripgrep` likewise. `most` are limits that no command gets more than. Commands run as `account` unless
    their own says otherwise; None: as this process does.
    """

    private: Path
    readable: Sequence[Path] = ()
    bwrap: Path | None = None
    most: CommandLimits = UNLIMITED
    ripgrep: Path | None = None
    account: Account | None = None
    hidden: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """`sandbox` is None when no tier that was tried holds; `refused` says of each that does not, why."""

    sandbox: LocalSandbox | None
    refused: dict[Tier, str] = field(default_factory=dict)


async def select_sandbox(tiers: Sequence[Tier], means: SandboxMeans) -> Selection:
    """Try tiers in this order and return the first that holds. `process`, which holds nothing, always does."""
    refused: dict[Tier, str] = {}
    for tier in tiers:
        if tier == "process":
            return Selection(LocalSandbox(most=means.most, account=means.account), refused)
        made = make_confinement(tier, means)
        if isinstance(made, str):
            refused[tier] = made
            continue
        sandbox = LocalSandbox(made, means.most, means.account)
        gaps = await find_gaps(sandbox, means.private, means.account)
        if not gaps:
            return Selection(sandbox, refused)
        await sandbox.close()
        refused[tier] = "; ".join(gaps)
    return Selection(None, refused)


def make_confinement(tier: Tier, means: SandboxMeans) -> Confinement | str:
    """Return what makes a tier, or why it cannot be had."""
    if not seccomp.supported():
        return "there is no system call filter for this machine's architecture"
    ripgrep = installed_ripgrep() if means.ripgrep is None else str(means.ripgrep)
    readable = [str(path) for path in means.readable]
    if ripgrep is not None:
        readable.append(ripgrep)
    hidden = [str(path) for path in (means.private, *means.hidden)]
    if tier == "namespace":
        bwrap = find_bwrap(None if means.bwrap is None else str(means.bwrap))
        if bwrap is None:
            return "there is no bubblewrap (bwrap) that is not setuid"
        as_root = means.account is None and acts_as_others()
        return Namespace(bwrap, readable=readable, hidden=hidden, as_root=as_root)
    if landlock.abi() < landlock.LEAST_ABI:
        return f"the kernel does not offer Landlock in version {landlock.LEAST_ABI} or newer"
    return Landlock(readable=readable, hidden=hidden)
