"""A service under load while its processes are killed: who runs, what is asked of it, what befalls it, what must hold."""
