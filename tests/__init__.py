"""Tests keep nothing that they learn in the user's cache directory, unless they say so, and their
threads wait without using a core that another test needs.
"""

import os

os.environ["ENTROPYKV_LEARN"] = "off"
# Threads of tiny models wait for each other after every few microseconds. Where several tests, or
# more threads than cores, compute at once, those that wait would take the time of those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
