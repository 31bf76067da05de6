"""The tables, for SQLite and Postgres alike.

What every column keeps to:

- Text of a caller (names, messages) and all JSON is UTF-8 in a binary column, because Postgres refuses U+0000 in text
  and in json. Paths are the bytes the file system knows. Plain text columns hold ASCII of our own making only.
- Ids compare byte by byte, so that their order is the order they were made in, whatever locale the database has.
- Times are milliseconds since the epoch.

`app.storage.sql.rows` turns values into rows and back; `migrations/` brings a database to this state.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

TOOL_KEY_BYTES: Final = 64
"""How much of a tool's name is indexed: a caller may call a tool by a name of any length."""

PATH_KEY_BYTES: Final = 256
"""How much of the path of a call is indexed."""

ROOT_MAX_BYTES: Final = 2000
"""Longest root: an index entry of Postgres holds little more."""

LARGE_ARGUMENTS_BYTES: Final = 2000
"""Longer arguments have a row of their own: SQLite writes a whole row anew for each change of it."""

OPEN_WORKSPACE: Final = "status IN ('active', 'deleting')"
KEYED: Final = "idempotency_key IS NOT NULL"
WITH_PATH: Final = "path IS NOT NULL"
ENDED: Final = "ended_at IS NOT NULL"
EXPIRES: Final = "status = 'active' AND expires_at IS NOT NULL"
FINISHED: Final = "finished_at IS NOT NULL"
RARE_ACTION: Final = "action <> 'batch.submitted'"
"""What the index by action of the audit log has: most rows are of batches, and to have those would cost each one."""
UNFINISHED_BATCH: Final = "status IN ('queued', 'running')"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

_ascii = Text().with_variant(Text(collation="C"), "postgresql")


workspaces = Table(
    "workspaces",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("owner", _ascii, nullable=False),
    Column("name", LargeBinary),
    Column("root", LargeBinary, nullable=False),
    # Unsigned 64-bit numbers, kept as the signed ones with the same bits.
    Column("root_device", BigInteger, nullable=False),
    Column("root_inode", BigInteger, nullable=False),
    Column("root_uid", BigInteger, nullable=False),
    Column("root_gid", BigInteger, nullable=False),
    Column("managed", Boolean, nullable=False),
    Column("trusted", Boolean, nullable=False),
    Column("options", LargeBinary, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("status", _ascii, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("last_used_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    # When it was deleted or had expired.
    Column("ended_at", BigInteger),
    # The key behind its scope, as `rows.scoped_key` writes it; null, like the digest, when the request had none.
    Column("idempotency_key", _ascii),
    Column("request_digest", LargeBinary),
    # Whose directory it is. Null only until the first start of a version that knows nodes.
    Column("node_id", _ascii),
    sqlite_with_rowid=False,
)
Index("ix_workspaces_owner", workspaces.c.owner, workspaces.c.id)
# One open workspace per root, and the way to find the roots below or above another, and the open ones at a start.
Index(
    "ux_workspaces_open_root",
    workspaces.c.root,
    unique=True,
    sqlite_where=text(OPEN_WORKSPACE),
    postgresql_where=text(OPEN_WORKSPACE),
)
Index(
    "ix_workspaces_expiry",
    workspaces.c.expires_at,
    sqlite_where=text(EXPIRES),
    postgresql_where=text(EXPIRES),
)
Index(
    "ix_workspaces_ended",
    workspaces.c.ended_at,
    workspaces.c.id,
    sqlite_where=text(ENDED),
    postgresql_where=text(ENDED),
)
Index(
    "ux_workspaces_idempotency_key",
    workspaces.c.idempotency_key,
    unique=True,
    sqlite_where=text(KEYED),
    postgresql_where=text(KEYED),
)


batches = Table(
    "batches",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("workspace_id", _ascii, ForeignKey("workspaces.id"), nullable=False),
    Column("owner", _ascii, nullable=False),
    Column("status", _ascii, nullable=False),
    Column("execution_mode", _ascii, nullable=False),
    Column("effective_mode", _ascii),
    Column("on_error", _ascii, nullable=False),
    Column("on_disconnect", _ascii, nullable=False),
    Column("timeout_ms", BigInteger),
    Column("has_errors", Boolean, nullable=False),
    Column("terminate", Boolean, nullable=False),
    Column("total", Integer, nullable=False),
    Column("succeeded", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("cancelled", Integer, nullable=False),
    Column("skipped", Integer, nullable=False),
    Column("request_id", _ascii, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("cancel_requested_at", BigInteger),
    # The fence: only a compare-and-set on both writes a batch. `claim` is the token of the claim that made `epoch`.
    Column("epoch", BigInteger, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("claim", _ascii),
    # How far retention has gone with it: a `Removal`.
    Column("removal", Integer, nullable=False),
    # As for workspaces.
    Column("idempotency_key", _ascii),
    Column("request_digest", LargeBinary),
    Column("metadata", LargeBinary, nullable=False),
    # Who runs it; null while it waits for a process of its workspace's node.
    Column("process_id", _ascii),
    sqlite_with_rowid=False,
)
Index("ix_batches_workspace", batches.c.workspace_id, batches.c.id)
Index("ix_batches_workspace_status", batches.c.workspace_id, batches.c.status, batches.c.id)
Index(
    "ix_batches_unfinished",
    batches.c.id,
    sqlite_where=text(UNFINISHED_BATCH),
    postgresql_where=text(UNFINISHED_BATCH),
)
Index(
    "ix_batches_removal",
    batches.c.removal,
    batches.c.finished_at,
    sqlite_where=text(FINISHED),
    postgresql_where=text(FINISHED),
)
Index(
    "ux_batches_idempotency_key",
    batches.c.idempotency_key,
    unique=True,
    sqlite_where=text(KEYED),
    postgresql_where=text(KEYED),
)


calls = Table(
    "calls",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("batch_id", _ascii, ForeignKey("batches.id"), nullable=False),
    Column("workspace_id", _ascii, nullable=False),
    # That of the batch: a list of one owner's calls walks an index.
    Column("owner", _ascii, nullable=False),
    Column("position", Integer, nullable=False),
    Column("tool_call_id", _ascii, nullable=False),
    Column("tool_name", LargeBinary, nullable=False),
    Column("status", _ascii, nullable=False),
    Column("error_code", _ascii),
    Column("error_message", LargeBinary),
    Column("queued_at", BigInteger, nullable=False),
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("duration_ms", BigInteger),
    Column("request_id", _ascii, nullable=False),
    Column("cancel_requested_at", BigInteger),
    # What an ended call is searched by, as `app.domain.call_summary` makes it.
    Column("path", LargeBinary),
    Column("summary", LargeBinary),
    Column("hooks", LargeBinary),
    # Null: they are in large_arguments.
    Column("arguments", LargeBinary),
    # The largest last: SQLite reads the columns before it without following its overflow pages.
    Column("result", LargeBinary),
)
Index("ux_calls_batch", calls.c.batch_id, calls.c.position, unique=True)
Index("ix_calls_workspace", calls.c.workspace_id, calls.c.id)
Index("ix_calls_owner", calls.c.owner, calls.c.id)
# Of one workspace: thousands of them have a README.md.
Index(
    "ix_calls_path",
    calls.c.workspace_id,
    text(f"substr(path, 1, {PATH_KEY_BYTES})"),
    calls.c.id,
    sqlite_where=text(WITH_PATH),
    postgresql_where=text(WITH_PATH),
)
Index("ix_calls_tool_call", calls.c.tool_call_id, calls.c.id)
Index("ix_calls_tool", text(f"substr(tool_name, 1, {TOOL_KEY_BYTES})"), calls.c.id)
Index("ix_calls_status", calls.c.status, calls.c.id)
Index(
    "ix_calls_error",
    calls.c.error_code,
    calls.c.id,
    sqlite_where=text("error_code IS NOT NULL"),
    postgresql_where=text("error_code IS NOT NULL"),
)


large_arguments = Table(
    "large_arguments",
    metadata,
    Column("call_id", _ascii, ForeignKey("calls.id"), primary_key=True),
    Column("data", LargeBinary, nullable=False),
)


# Rows of the next two are only ever added, after the fence of their batch let them; the check of a foreign key for
# each would cost more than the row.
events = Table(
    "events",
    metadata,
    Column("batch_id", _ascii, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("type", _ascii, nullable=False),
    Column("call_id", _ascii),
    Column("at", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("batch_id", "seq"),
    sqlite_with_rowid=False,
)

call_output = Table(
    "call_output",
    metadata,
    Column("batch_id", _ascii, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("part", Integer, nullable=False),
    Column("call_id", _ascii, nullable=False),
    Column("stream", _ascii, nullable=False),
    Column("stream_offset", BigInteger, nullable=False),
    Column("combined_offset", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    PrimaryKeyConstraint("batch_id", "seq", "part"),
    sqlite_with_rowid=False,
)
# A stream is read through the same index: its rows are those of the call, so `stream` only skips some.
Index("ix_call_output_call", call_output.c.call_id, call_output.c.combined_offset, call_output.c.stream)


api_keys = Table(
    "api_keys",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("name", LargeBinary, nullable=False),
    Column("owner", _ascii, nullable=False),
    Column("token_hash", LargeBinary, nullable=False),
    Column("scopes", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("created_by", _ascii, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    sqlite_with_rowid=False,
)
Index("ux_api_keys_token_hash", api_keys.c.token_hash, unique=True)


secrets = Table(
    "secrets",
    metadata,
    Column("name", _ascii, primary_key=True),
    Column("value", LargeBinary, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)


nodes = Table(
    "nodes",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    # Up to when temporary files of interrupted batches were removed.
    Column("swept_at", BigInteger),
    sqlite_with_rowid=False,
)


# Times are the database's, so that no two clocks are compared.
processes = Table(
    "processes",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("node_id", _ascii),
    Column("role", _ascii, nullable=False),
    Column("url", _ascii),
    Column("started_at", BigInteger, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)


# Rows are only ever added, but for what retention removes.
audit_events = Table(
    "audit_events",
    metadata,
    Column("id", _ascii, primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("action", _ascii, nullable=False),
    Column("actor", _ascii, nullable=False),
    Column("owner", _ascii, nullable=False),
    Column("target", _ascii),
    Column("request_id", _ascii),
    Column("details", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
Index("ix_audit_events_actor", audit_events.c.actor, audit_events.c.id)
Index(
    "ix_audit_events_target",
    audit_events.c.target,
    audit_events.c.id,
    sqlite_where=text("target IS NOT NULL"),
    postgresql_where=text("target IS NOT NULL"),
)
Index(
    "ix_audit_events_action",
    audit_events.c.action,
    audit_events.c.id,
    sqlite_where=text(RARE_ACTION),
    postgresql_where=text(RARE_ACTION),
)
