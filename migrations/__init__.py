"""The schema's history: one chain of revisions for SQLite and Postgres.

A new revision is a file in `versions/` named after its number, and its number is `HEAD`. `tests/migrations` holds the
chain against the tables of `app.storage.sql.schema`.
"""

from pathlib import Path
from typing import Final

HEAD: Final = "0002"
"""The newest revision. A database that says so needs nothing, and nothing of Alembic is loaded to find out."""

LOCATION: Final = Path(__file__).parent
