"""The schema's history: one chain of revisions for SQLite and Postgres."""

from pathlib import Path
from typing import Final

HEAD: Final = "0001"
"""The newest revision. A database that says so needs nothing, and nothing of Alembic is loaded to find out."""

LOCATION: Final = Path(__file__).parent
