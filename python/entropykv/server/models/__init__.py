"""List, load and unload the models of a server."""
