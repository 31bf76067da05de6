"""A program that stands in for `pwsh`: it keeps its arguments and understands as much PowerShell as the tests write.

Statements stand on lines of their own. What PowerShell does by itself is done as its documentation says: the exit code
of `-Command` is 0 or 1, by whether the last statement succeeded; `exit N` ends with N, an uncaught `throw` with 1;
`$?` is whether the last statement succeeded and `$LASTEXITCODE` the code of the last program.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ARGUMENTS_FILE = "pwsh-arguments.json"


def install(directory: Path) -> Path:
    """Write the program as `pwsh` into a directory and return its path."""
    program = directory / "pwsh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} {directory} "$@"\n')
    program.chmod(0o755)
    return program


def main(kept_in: str, arguments: list[str]) -> int:
    record = {"argv": arguments, "env": dict(os.environ)}
    (Path(kept_in) / ARGUMENTS_FILE).write_text(json.dumps(record))
    if arguments[:-1] != ["-NoLogo", "-NoProfile", "-NonInteractive", "-Command"]:
        sys.stderr.write("Usage: pwsh[.exe] ...\n")
        return 64
    return Interpreter().run(arguments[-1])


class Interpreter:
    def __init__(self) -> None:
        self.succeeded = True
        self.last_exit_code: int | None = None
        self.variables: dict[str, str] = {}

    def run(self, script: str) -> int:
        body = re.sub(r"\A\s*param\((.*?)\)", self.bind, script, flags=re.DOTALL)
        body = re.sub(r"@'\n(.*?)\n'@", lambda match: f"'{match[1]}'".replace("\n", "\0"), body, flags=re.DOTALL)
        for statement in body.replace("`\n", " ").split("\n"):
            code = self.execute(statement.replace("\0", "\n").strip())
            if code is not None:
                return code
        return 0 if self.succeeded else 1

    def bind(self, match: re.Match[str]) -> str:
        for name, value in re.findall(r"\$(\w+)\s*=\s*'([^']*)'", match[1]):
            self.variables[name] = value
        return ""

    def execute(self, statement: str) -> int | None:
        """Run one statement and return the exit code when it ends the script."""
        if not statement or statement.startswith("#"):
            return None
        if condition := re.fullmatch(r"if \((.*)\) \{ (exit .*) \}", statement):
            return self.execute(condition[2]) if self.holds(condition[1]) else None
        if leaving := re.fullmatch(r"exit (\d+|\$LASTEXITCODE)", statement):
            return self.last_exit_code if leaving[1].startswith("$") else int(leaving[1])
        if thrown := re.fullmatch(r"throw '(.*)'", statement):
            sys.stderr.write(f"Exception: {thrown[1]}\n")
            return 1
        if written := re.fullmatch(r"Write-Output (?:'(.*)'|\$(\w+))", statement, re.DOTALL):
            sys.stdout.buffer.write(f"{written[1] if written[2] is None else self.variables[written[2]]}\n".encode())
            sys.stdout.flush()
            self.succeeded = True
        elif native := re.fullmatch(r"bash -c '(.*)'", statement, re.DOTALL):
            self.last_exit_code = subprocess.run(["/bin/bash", "-c", native[1]], check=False).returncode
            self.succeeded = self.last_exit_code == 0
        else:
            sys.stderr.write(f"{statement}: The term is not recognized as a name of a cmdlet or program.\n")
            self.succeeded = False
        return None

    def holds(self, condition: str) -> bool:
        if condition == "$?":
            return self.succeeded
        assert condition == "(Test-Path -LiteralPath Variable:\\LASTEXITCODE) -and $LASTEXITCODE", condition
        return bool(self.last_exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
