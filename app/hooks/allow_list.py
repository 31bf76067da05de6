"""The tool allow-list: a workspace whose options name tools runs those and no others."""

from app.hooks.base import BeforeContext, BeforeVerdict, Block, Hook


class AllowListHook(Hook):
    name = "allow-list"

    async def before_tool_call(self, context: BeforeContext) -> BeforeVerdict:
        allowed = context.workspace.options.tools
        if allowed is None or context.tool.name in allowed:
            return None
        listed = ", ".join(allowed) or "none"
        return Block(f"The tool {context.tool.name} is not allowed in this workspace. Allowed: {listed}.")
