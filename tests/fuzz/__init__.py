"""Random use of the package, through what its users have: `make fuzz`.

A run is made from one number, its seed: the model, the settings, the operations and their values.
So the same seed finds the same defect again. There are runs of a session (`7`), of a pool beside a
fresh reading of the same texts (`pool-7`), of crafted session files (`file-7`), and of requests at
a live server (`server-7`).

The parts, from the outside in: __main__ (which runs, for how long, and what a crash looks like),
worker (a process that takes runs), run, pools, files and live (one run of each kind), operations
(what a session can be asked for), hostile (what a server can be sent), forgery (what can be done to
a file), checks (what must hold after each), models and options (what a session is made of),
directed (scenarios that chance would hardly reach).
"""
