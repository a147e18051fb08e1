"""Run the tests of llama.cpp's server against entropykv: see __main__.py."""
