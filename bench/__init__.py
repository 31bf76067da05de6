"""What Toolcrib costs, each figure beside its floor from the same run: `python -m bench`."""
