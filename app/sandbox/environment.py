"""The environment of a command: made from an allow-list, so that nothing of the service's own can be in it.

Proxy variables are left out with everything else: their values often hold a password.
"""

import functools
import os
import pwd
import re
import shutil
from collections.abc import Mapping
from typing import Final

from app.sandbox.account import Account

DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MAX_VARIABLES: Final = 256
MAX_VALUE_BYTES: Final = 32_768
MAX_TOTAL_BYTES: Final = 131_072

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LOCALE: Final = (
    "LANG", "LANGUAGE", "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT",
    "LC_MESSAGES", "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME",
)  # fmt: skip
_UTF8: Final = re.compile(r"\.utf-?8(@|$)", re.IGNORECASE)

# What makes a loader, a shell or an interpreter run or load something before the command itself. A command can set
# these for its own children, in sight of whoever reads it; as variables from outside they are refused.
_HOOK_PREFIXES: Final = (
    "LD_", "DYLD_", "BASH_FUNC_", "LUA_INIT", "GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_",
)  # fmt: skip
_HOOKS: Final = frozenset(
    {
        # the C library
        "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCPATH", "MALLOC_TRACE", "NIS_PATH", "NLSPATH",
        "RESOLV_HOST_CONF",
        # shells
        "BASH_ENV", "BASH_LOADABLES_PATH", "BASHOPTS", "BASH_XTRACEFD", "ENV", "PROMPT_COMMAND", "PS0", "PS4",
        "SHELLOPTS", "ZDOTDIR",
        # Python, Perl, Ruby, Node.js, Java, .NET, PHP, R, PowerShell
        "PYTHONBREAKPOINT", "PYTHONEXECUTABLE", "PYTHONHOME", "PYTHONINSPECT", "PYTHONPATH", "PYTHONPLATLIBDIR",
        "PYTHONPYCACHEPREFIX", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONWARNINGS",
        "PERL5DB", "PERL5LIB", "PERL5OPT", "PERLLIB",
        "RUBYLIB", "RUBYOPT",
        "NODE_OPTIONS", "NODE_PATH",
        "CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS",
        "CORECLR_ENABLE_PROFILING", "CORECLR_PROFILER", "CORECLR_PROFILER_PATH", "COR_ENABLE_PROFILING", "COR_PROFILER",
        "COR_PROFILER_PATH", "DOTNET_STARTUP_HOOKS",
        "PHPRC", "PHP_INI_SCAN_DIR",
        "R_ENVIRON", "R_ENVIRON_USER", "R_PROFILE", "R_PROFILE_USER",
        "PSModulePath",
        # programs that start other programs or load modules
        "GIT_ASKPASS", "GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS", "GIT_EXEC_PATH", "GIT_EXTERNAL_DIFF",
        "GIT_PROXY_COMMAND", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_TEMPLATE_DIR", "LESSCLOSE", "LESSOPEN",
        "OPENSSL_CONF", "OPENSSL_ENGINES", "OPENSSL_MODULES", "SSH_ASKPASS", "SUDO_ASKPASS",
    }
)  # fmt: skip


def command_environment(root: str, extra: Mapping[str, str], account: Account | None = None) -> dict[str, str]:
    """Return the whole environment of a command that starts in `root`; `extra` has been checked, and wins.

    It runs as `account`, None: as this process does. PATH, locale and time zone are the service's; the character set is
    UTF-8 in any case. HOME is the workspace.
    """
    shell = find_program("bash")
    environment = {
        "PATH": _path(),
        "HOME": root,
        "PWD": root,
        "SHELL": shell or "/bin/sh",
        "TERM": "dumb",
        "TMPDIR": _temporary_directory(root),
        **_user(os.geteuid() if account is None else account.uid),
        **_locale(),
    }
    if "TZ" in os.environ:
        environment["TZ"] = os.environ["TZ"]
    environment.update(extra)
    return environment


def check_variables(variables: Mapping[str, str]) -> None:
    """Check variables that a caller adds.

    Raises:
        ValueError: naming the variable, for a name that is none, a value that cannot be one, a hook of a loader or an
            interpreter, and too much of it.
    """
    if len(variables) > MAX_VARIABLES:
        raise ValueError(f"at most {MAX_VARIABLES} variables can be set (got {len(variables)})")
    total = 0
    for name, value in variables.items():
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:80]!r} is no name of a variable (letters, digits and _, no digit first)")
        if name in _HOOKS or name.startswith(_HOOK_PREFIXES):
            raise ValueError(
                f"{name} may not be set from outside, because it makes programs load or run something of its own; "
                "set it inside the command where it is needed"
            )
        if "\0" in value:
            raise ValueError(f"the value of {name} holds the character U+0000")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"the value of {name} is no valid Unicode") from None
        if size > MAX_VALUE_BYTES:
            raise ValueError(f"the value of {name} has {size} bytes; at most {MAX_VALUE_BYTES} are possible")
        total += len(name) + size
    if total > MAX_TOTAL_BYTES:
        raise ValueError(f"the variables have {total} bytes in all; at most {MAX_TOTAL_BYTES} are possible")


def find_program(name: str) -> str | None:
    """Return the absolute path of a program on the commands' PATH; None when there is none."""
    found = _found(name, _path())
    if found is None:
        # Not remembered, so that a program installed meanwhile is found.
        _found.cache_clear()
    return found


@functools.lru_cache(maxsize=16)
def _found(name: str, path: str) -> str | None:
    return shutil.which(name, path=path)


def _path() -> str:
    # An empty or relative entry would mean a directory below the workspace.
    entries = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if entry.startswith("/")]
    return os.pathsep.join(entries) or DEFAULT_PATH


def _locale() -> dict[str, str]:
    found = {name: value for name in _LOCALE if (value := os.environ.get(name))}
    characters = found.get("LC_ALL") or found.get("LC_CTYPE") or found.get("LANG") or ""
    if _UTF8.search(characters) is None:
        return {"LANG": "C.UTF-8"}
    return {"LANG": characters, **found}


def _temporary_directory(root: str) -> str:
    return "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else root  # noqa: S108 - the machine's own, on purpose


@functools.lru_cache(maxsize=64)
def _user(uid: int) -> dict[str, str]:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return {"USER": name, "LOGNAME": name}
