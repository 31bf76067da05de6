"""The programs that commands are started with, where the account of the commands can start them.

A virtual environment below the home of root cannot be reached by anybody else, and bubblewrap and ripgrep are in it.
"""

import os
import secrets
import shutil
from pathlib import Path

from app.sandbox.account import Account, may_run


def provide(program: str, account: Account | None, directory: Path) -> str:
    """Return a path at which an account may start a program: where it is, or that of a copy below `directory`.

    Libraries that came in one wheel with it are copied too, to where it looks for them.

    Raises:
        OSError: the copy cannot be made.
    """
    if account is None or may_run(program, account):
        return program
    source = Path(program)
    package = source.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    if not libraries.is_dir():
        return str(_copy(source, directory / source.name))
    for library in libraries.iterdir():
        _copy(library, directory / libraries.name / library.name)
    return str(_copy(source, directory / package.name / source.parent.name / source.name))


def _copy(source: Path, target: Path) -> Path:
    """Copy a file in one step, as an older copy may be running; everybody may read and start it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for made in (target.parent, *target.parent.parents):
        if made.stat().st_uid != os.geteuid() or made.stat().st_mode & 0o011 == 0o011:
            break
        made.chmod(made.stat().st_mode | 0o011)
    temporary = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
    try:
        shutil.copyfile(source, temporary)
        temporary.chmod(0o755)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return target
