"""Workspaces, batches, calls, events, captured output and API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_OPEN_WORKSPACE = sa.text("status IN ('active', 'deleting')")
_ENDED = sa.text("ended_at IS NOT NULL")
_EXPIRES = sa.text("status = 'active' AND expires_at IS NOT NULL")
_FINISHED = sa.text("finished_at IS NOT NULL")
_KEYED = sa.text("idempotency_key IS NOT NULL")
_UNFINISHED_BATCH = sa.text("status IN ('queued', 'running')")
_WITH_PATH = sa.text("path IS NOT NULL")
_FAILED_CALL = sa.text("error_code IS NOT NULL")


def upgrade() -> None:
    ascii_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

    op.create_table(
        "workspaces",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("owner", ascii_text, nullable=False),
        sa.Column("name", sa.LargeBinary),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("root_device", sa.BigInteger, nullable=False),
        sa.Column("root_inode", sa.BigInteger, nullable=False),
        sa.Column("root_uid", sa.BigInteger, nullable=False),
        sa.Column("root_gid", sa.BigInteger, nullable=False),
        sa.Column("managed", sa.Boolean, nullable=False),
        sa.Column("trusted", sa.Boolean, nullable=False),
        sa.Column("options", sa.LargeBinary, nullable=False),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.Column("status", ascii_text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("idempotency_key", ascii_text),
        sa.Column("request_digest", sa.LargeBinary),
        sa.PrimaryKeyConstraint("id", name="pk_workspaces"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_workspaces_owner", "workspaces", ["owner", "id"])
    op.create_index(
        "ux_workspaces_open_root",
        "workspaces",
        ["root"],
        unique=True,
        sqlite_where=_OPEN_WORKSPACE,
        postgresql_where=_OPEN_WORKSPACE,
    )
    op.create_index(
        "ix_workspaces_expiry",
        "workspaces",
        ["expires_at"],
        sqlite_where=_EXPIRES,
        postgresql_where=_EXPIRES,
    )
    op.create_index(
        "ix_workspaces_ended",
        "workspaces",
        ["ended_at", "id"],
        sqlite_where=_ENDED,
        postgresql_where=_ENDED,
    )
    op.create_index(
        "ux_workspaces_idempotency_key",
        "workspaces",
        ["idempotency_key"],
        unique=True,
        sqlite_where=_KEYED,
        postgresql_where=_KEYED,
    )

    op.create_table(
        "batches",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("workspace_id", ascii_text, nullable=False),
        sa.Column("owner", ascii_text, nullable=False),
        sa.Column("status", ascii_text, nullable=False),
        sa.Column("execution_mode", ascii_text, nullable=False),
        sa.Column("effective_mode", ascii_text),
        sa.Column("on_error", ascii_text, nullable=False),
        sa.Column("on_disconnect", ascii_text, nullable=False),
        sa.Column("timeout_ms", sa.BigInteger),
        sa.Column("has_errors", sa.Boolean, nullable=False),
        sa.Column("terminate", sa.Boolean, nullable=False),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("succeeded", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("cancelled", sa.Integer, nullable=False),
        sa.Column("skipped", sa.Integer, nullable=False),
        sa.Column("request_id", ascii_text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("cancel_requested_at", sa.BigInteger),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("claim", ascii_text),
        sa.Column("removal", sa.Integer, nullable=False),
        sa.Column("idempotency_key", ascii_text),
        sa.Column("request_digest", sa.LargeBinary),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
        sa.ForeignKeyConstraint(["workspace_id"], ["workspaces.id"], name="fk_batches_workspace_id"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_batches_workspace", "batches", ["workspace_id", "id"])
    op.create_index("ix_batches_workspace_status", "batches", ["workspace_id", "status", "id"])
    op.create_index(
        "ix_batches_unfinished",
        "batches",
        ["id"],
        sqlite_where=_UNFINISHED_BATCH,
        postgresql_where=_UNFINISHED_BATCH,
    )
    op.create_index(
        "ix_batches_removal",
        "batches",
        ["removal", "finished_at"],
        sqlite_where=_FINISHED,
        postgresql_where=_FINISHED,
    )
    op.create_index(
        "ux_batches_idempotency_key",
        "batches",
        ["idempotency_key"],
        unique=True,
        sqlite_where=_KEYED,
        postgresql_where=_KEYED,
    )

    op.create_table(
        "calls",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("batch_id", ascii_text, nullable=False),
        sa.Column("workspace_id", ascii_text, nullable=False),
        sa.Column("owner", ascii_text, nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("tool_call_id", ascii_text, nullable=False),
        sa.Column("tool_name", sa.LargeBinary, nullable=False),
        sa.Column("status", ascii_text, nullable=False),
        sa.Column("error_code", ascii_text),
        sa.Column("error_message", sa.LargeBinary),
        sa.Column("queued_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("duration_ms", sa.BigInteger),
        sa.Column("request_id", ascii_text, nullable=False),
        sa.Column("cancel_requested_at", sa.BigInteger),
        sa.Column("path", sa.LargeBinary),
        sa.Column("summary", sa.LargeBinary),
        sa.Column("hooks", sa.LargeBinary),
        sa.Column("arguments", sa.LargeBinary),
        sa.Column("result", sa.LargeBinary),
        sa.PrimaryKeyConstraint("id", name="pk_calls"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="fk_calls_batch_id"),
    )
    op.create_index("ux_calls_batch", "calls", ["batch_id", "position"], unique=True)
    op.create_index("ix_calls_workspace", "calls", ["workspace_id", "id"])
    op.create_index("ix_calls_owner", "calls", ["owner", "id"])
    op.create_index(
        "ix_calls_path",
        "calls",
        ["workspace_id", sa.text("substr(path, 1, 256)"), "id"],
        sqlite_where=_WITH_PATH,
        postgresql_where=_WITH_PATH,
    )
    op.create_index("ix_calls_tool_call", "calls", ["tool_call_id", "id"])
    op.create_index("ix_calls_tool", "calls", [sa.text("substr(tool_name, 1, 64)"), "id"])
    op.create_index("ix_calls_status", "calls", ["status", "id"])
    op.create_index(
        "ix_calls_error",
        "calls",
        ["error_code", "id"],
        sqlite_where=_FAILED_CALL,
        postgresql_where=_FAILED_CALL,
    )

    op.create_table(
        "large_arguments",
        sa.Column("call_id", ascii_text, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("call_id", name="pk_large_arguments"),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_large_arguments_call_id"),
    )

    op.create_table(
        "events",
        sa.Column("batch_id", ascii_text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("type", ascii_text, nullable=False),
        sa.Column("call_id", ascii_text),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "seq", name="pk_events"),
        sqlite_with_rowid=False,
    )

    op.create_table(
        "call_output",
        sa.Column("batch_id", ascii_text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("call_id", ascii_text, nullable=False),
        sa.Column("stream", ascii_text, nullable=False),
        sa.Column("stream_offset", sa.BigInteger, nullable=False),
        sa.Column("combined_offset", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "seq", "part", name="pk_call_output"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_call_output_call", "call_output", ["call_id", "combined_offset", "stream"])

    op.create_table(
        "api_keys",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("owner", ascii_text, nullable=False),
        sa.Column("token_hash", sa.LargeBinary, nullable=False),
        sa.Column("scopes", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", ascii_text, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sqlite_with_rowid=False,
    )
    op.create_index("ux_api_keys_token_hash", "api_keys", ["token_hash"], unique=True)

    op.create_table(
        "secrets",
        sa.Column("name", ascii_text, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
        sqlite_with_rowid=False,
    )

    op.create_table(
        "audit_events",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("action", ascii_text, nullable=False),
        sa.Column("actor", ascii_text, nullable=False),
        sa.Column("owner", ascii_text, nullable=False),
        sa.Column("target", ascii_text),
        sa.Column("request_id", ascii_text),
        sa.Column("details", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_events"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_audit_events_actor", "audit_events", ["actor", "id"])
    targeted, rare = sa.text("target IS NOT NULL"), sa.text("action <> 'batch.submitted'")
    op.create_index(
        "ix_audit_events_target",
        "audit_events",
        ["target", "id"],
        sqlite_where=targeted,
        postgresql_where=targeted,
    )
    op.create_index(
        "ix_audit_events_action", "audit_events", ["action", "id"], sqlite_where=rare, postgresql_where=rare
    )


def downgrade() -> None:
    tables = ("audit_events", "secrets", "api_keys", "call_output", "events", "large_arguments", "calls")
    for table in (*tables, "batches", "workspaces"):
        op.drop_table(table)
