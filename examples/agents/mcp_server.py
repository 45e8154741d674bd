"""A tool server that speaks MCP over its standard input and output: ``python mcp_server.py``."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str) -> float:
    """Return the price of an item of the shop."""
    return {"tea": 3.5, "bread": 2.25}[item]


if __name__ == "__main__":
    server.run()
