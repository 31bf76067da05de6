"""The floor: a FastAPI application that echoes a body after one fsynced SQLite commit, and nothing else.

The commit runs on the event loop: with one request at a time no design is quicker, which is what makes it a floor.
"""

import os
import sqlite3
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class Body(BaseModel):
    path: str


class Answer(BaseModel):
    id: int
    status: str
    arguments: dict[str, Any]


database = sqlite3.connect(Path(os.environ["BENCH_DIR"]) / "floor.db", isolation_level=None)
database.execute("PRAGMA journal_mode=WAL")
database.execute("PRAGMA synchronous=FULL")
database.execute("CREATE TABLE IF NOT EXISTS calls (id INTEGER PRIMARY KEY, arguments TEXT)")

app = FastAPI()


@app.post("/echo")
async def echo(body: Body) -> Answer:
    database.execute("BEGIN IMMEDIATE")
    cursor = database.execute("INSERT INTO calls (arguments) VALUES (?)", (body.path,))
    database.execute("COMMIT")
    return Answer(id=cursor.lastrowid or 0, status="completed", arguments={"path": body.path})
