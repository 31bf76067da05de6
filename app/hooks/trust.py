"""Trust: an untrusted workspace may be looked at, not written to, and runs no commands."""

from app.hooks.base import BeforeContext, BeforeVerdict, Block, Hook


class TrustHook(Hook):
    name = "trust"

    async def before_tool_call(self, context: BeforeContext) -> BeforeVerdict:
        if context.workspace.trusted or context.tool.annotations.read_only_hint:
            return None
        return Block(
            f"This workspace is not trusted, so {context.tool.name} is not allowed in it; tools that only read are. "
            'An operator can trust it with PATCH /v1/workspaces/{id} {"trusted": true}.'
        )
