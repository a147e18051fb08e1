"""Tests keep nothing that they learn in the user's cache directory, unless they say so."""

import os

os.environ["ENTROPYKV_LEARN"] = "off"
