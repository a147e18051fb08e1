"""Wrap llama.cpp's C interface: context, model, batch, windows, position shifts, recurrent
states.
"""
