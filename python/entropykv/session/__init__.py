"""Run texts inside a budget: decoding, generation, pools, recovery, and saved sessions."""
