"""How the service is watched: structured logs, metrics, traces, and what is reported to the two latter."""
