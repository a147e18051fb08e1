"""Serve models inside KV budgets by the APIs of OpenAI, Anthropic, Ollama and llama-server.

Without the extra `server`, importing this package raises MissingExtraError.

>>> from entropykv.server import ModelOptions, ServerOptions, create_app
>>> app = create_app(ModelOptions(model="model.gguf", kv_budget="0.2"), ServerOptions())
>>> app.state.engine.stats.kv_bytes_now
"""

from entropykv.errors import MissingExtraError

try:
    import fastapi  # noqa: F401
    import pydantic_settings  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"the server needs {error.name}, which is not installed; run "
        'pip install "entropykv[server]"'
    ) from None

from entropykv.server.engine.engine import Engine
from entropykv.server.http.app import create_app
from entropykv.server.models.catalog import ModelCatalog, ServedModel
from entropykv.server.options import ModelOptions, ServerOptions

__all__ = [
    "Engine",
    "ModelCatalog",
    "ModelOptions",
    "ServedModel",
    "ServerOptions",
    "create_app",
]
