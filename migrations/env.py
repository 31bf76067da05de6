"""Runs the revisions on the connection that `app.storage.sql.migrate` hands over, inside its transaction."""

from alembic import context

from app.storage.sql.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    # SQLite changes a table by making it anew.
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
