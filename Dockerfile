# `entropykv serve` on the CPU:
#
#   docker build -t entropykv .
#   docker run -p 127.0.0.1:8000:8000 -v ~/models:/models:ro entropykv -m /models/model.gguf --kv-budget 2GiB
#
# llama.cpp is built for the CPU of the machine that builds the image. For an image that also runs
# elsewhere, build with --build-arg CMAKE_ARGS="-DGGML_NATIVE=OFF"; entropykv's own kernels are in
# the image for every instruction set, and are chosen when the server starts.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends build-essential
ARG CMAKE_ARGS=""
WORKDIR /source
COPY . .
RUN python -m venv /opt/entropykv && CMAKE_ARGS="$CMAKE_ARGS" /opt/entropykv/bin/pip install --no-cache-dir ".[server,hub]"

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/entropykv /opt/entropykv
# What is learnt of models, and models of the hub, are in /home/entropykv/.cache: make it a volume to
# keep them.
RUN useradd --create-home entropykv
USER entropykv
WORKDIR /home/entropykv
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["/opt/entropykv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["/opt/entropykv/bin/entropykv", "serve", "--host", "0.0.0.0", "--port", "8000"]
