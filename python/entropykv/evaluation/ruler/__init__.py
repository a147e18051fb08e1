"""Make RULER's synthetic tasks (arXiv 2404.06654), as NVIDIA/RULER defines them.

Templates, counts and lengths of answers are those of scripts/synthetic.yaml and
scripts/data/synthetic there. The code is our own and draws its own random numbers. Therefore the
prompts are of the same kind as the originals, but not identical.
"""
