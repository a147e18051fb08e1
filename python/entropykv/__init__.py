"""entropykv: a hard KV-cache budget for GGUF models in stock llama.cpp."""
