"""Receive requests: the app, keys, hosts, bodies, connections, metrics."""
