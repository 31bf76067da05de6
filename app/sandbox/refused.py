"""Commands refused: what stands in for a sandbox where none may be used."""

from app.errors import ErrorCode, ToolError
from app.sandbox.base import CommandCounts, ProcessHandle, ProcessSpec, SandboxReport


class RefusedSandbox:
    """Starts nothing. `reason` is told to the caller and says how the operator can change it."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.counts = CommandCounts()

    @property
    def report(self) -> SandboxReport:
        return SandboxReport("process", ("commands",))

    async def start(self, spec: ProcessSpec) -> ProcessHandle:  # noqa: ARG002 - of the protocol
        """Raise ToolError `sandbox_unavailable`."""
        raise ToolError(ErrorCode.SANDBOX_UNAVAILABLE, self._reason)

    @property
    def running(self) -> int:
        """None ever runs."""
        return 0

    async def close(self) -> None:
        """There is nothing to give back."""
