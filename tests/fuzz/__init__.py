"""Random sequences of operations on tiny models through the public Session: `make fuzz`.

A run is made from one number, its seed: the model, the settings, the operations and their values.
So the same seed finds the same defect again. The parts, from the outside in: __main__ (which runs,
for how long, and what a crash looks like), worker (a process that takes runs), run (one run),
operations (what a session can be asked for), checks (what must hold after each), models and
options (what a session is made of), directed (scenarios that chance would hardly reach).
"""
