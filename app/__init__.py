"""Toolcrib: file and shell tools over HTTP."""

__version__ = "0.1.0"
