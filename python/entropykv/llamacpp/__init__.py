"""Low-level calls of llama.cpp: context, model, batch, windows, shifts, recurrent states."""
