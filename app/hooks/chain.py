"""The chain a service runs: the built-in hooks, then what installed packages offer as entry points."""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from app.errors import ConfigurationError
from app.hooks.allow_list import AllowListHook
from app.hooks.base import HOOK_SECONDS, Hook, HookChain
from app.hooks.telemetry import TelemetryHook
from app.hooks.trust import TrustHook

ENTRY_POINT_GROUP: Final = "toolcrib.hooks"


def load_hooks() -> list[Hook]:
    """Return the hooks of installed packages, in the order of their entry points' names.

    An entry point names a `Hook` instance or something that makes one when called without arguments.

    Raises:
        ConfigurationError: one cannot be loaded or is no hook; a service never starts without a hook it was given.
    """
    return [_load(point) for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)]


def hook_chain(configured: list[Hook], *, seconds: float = HOOK_SECONDS) -> HookChain:
    """Return the chain in its order: trust, allow-list, configured hooks, telemetry."""
    built_in = (TrustHook(), AllowListHook(), TelemetryHook())
    return HookChain([*built_in[:2], *configured, built_in[2]], seconds=seconds, built_in=frozenset(built_in))


def _load(point: EntryPoint) -> Hook:
    try:
        made = point.load()
        hook = made if isinstance(made, Hook) else made()
    except Exception as error:
        raise ConfigurationError(f"the hook {point.name} ({point.value}) cannot be loaded: {error}") from error
    if not isinstance(hook, Hook):
        raise ConfigurationError(f"the hook {point.name} ({point.value}) is no app.hooks.base.Hook")
    return hook
