"""How the BitNet model in the package was made."""
