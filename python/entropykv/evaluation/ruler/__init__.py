"""Make RULER's synthetic tasks (arXiv 2404.06654), by the definition in NVIDIA/RULER.

Templates, counts and lengths of answers are those of scripts/synthetic.yaml and
scripts/data/synthetic there. The code is ours and draws its own random numbers, so that prompts are
of the same kind as the originals', but not the same ones.
"""
