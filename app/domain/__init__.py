"""Values: pydantic, orjson and the standard library only."""
