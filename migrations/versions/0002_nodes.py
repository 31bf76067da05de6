"""Nodes and processes: whose workspaces are whose, and who runs a batch."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    ascii_text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

    op.create_table(
        "nodes",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("swept_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "processes",
        sa.Column("id", ascii_text, nullable=False),
        sa.Column("node_id", ascii_text),
        sa.Column("role", ascii_text, nullable=False),
        sa.Column("url", ascii_text),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_processes"),
        sqlite_with_rowid=False,
    )
    op.add_column("workspaces", sa.Column("node_id", ascii_text))
    op.add_column("batches", sa.Column("process_id", ascii_text))
    # Held by nobody who lives: the next start recovers them.
    op.execute("UPDATE batches SET process_id = '' WHERE status IN ('queued', 'running')")


def downgrade() -> None:
    op.drop_column("batches", "process_id")
    op.drop_column("workspaces", "node_id")
    op.drop_table("processes")
    op.drop_table("nodes")
