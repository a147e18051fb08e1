"""Train the BitNet model that the package ships."""
