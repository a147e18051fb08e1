"""Use the package randomly, through its public interfaces: `make fuzz`.

A run is determined by one number, its seed: the model, the settings, the operations and their
values. Therefore the same seed finds the same defect again. There are runs of a session (`7`), of a
pool compared with fresh sessions that read the same texts (`pool-7`), of crafted session files
(`file-7`), and of requests to a live server (`server-7`).

The modules, from the outside in: __main__ (which runs, for how long, and how a crash is reported),
worker (a process that executes runs), session_runs, pool_runs, file_runs and server_runs (one run
of each kind), operations (what a session can be asked for), hostile (what a server can be sent),
forgery (how a file can be changed), promises (what must hold after each operation), oracle (which
logits a token must have), models and options (what a session is made of), directed (scenarios that
random runs would hardly reach). The module metadata is a program of its own, which damages model
files.
"""
