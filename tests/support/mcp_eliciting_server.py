"""An MCP server of the `mcp` package, over stdio, whose tool asks the user for a name during the call."""

from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

server = MCPServer("greeter", log_level="ERROR")


class Name(BaseModel):
    name: str


@server.tool()
async def greet(context: Context) -> str:
    """Greet the user."""
    answer = await context.elicit("Your name?", Name)
    return f"Hello, {answer.data.name}!" if answer.action == "accept" else answer.action


server.run("stdio")
