"""The disk under a workspace: what it must have free before a command is started there."""

import os

from app.errors import ErrorCode, ToolError


def require_free(directory: int, least: int) -> None:
    """Check that the file system of an open directory has room for more.

    Raises:
        ToolError: `no_space`: it has less than `least` bytes free for the user this process runs as.
    """
    if not least:
        return
    try:
        status = os.fstatvfs(directory)
    except OSError:
        return  # one that does not tell is no reason to refuse
    free = status.f_bavail * status.f_frsize
    if free < least:
        raise ToolError(
            ErrorCode.NO_SPACE,
            f"the disk under the workspace has {free} bytes free, and no command is started below {least}; remove "
            "files that are not needed (an rm is a command too: write an empty file over a large one, or delete it "
            "over the files API), or have the disk enlarged",
            {"freeBytes": free, "minFreeBytes": least},
        )
