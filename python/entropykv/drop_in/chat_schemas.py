"""Check the JSON schemas of a chat before llama-cpp-python makes grammars of them."""

from __future__ import annotations

import inspect
from typing import Any

import llama_cpp
from llama_cpp.llama_grammar import LlamaGrammar

from entropykv.llamacpp.schema_converter import grammar_of_schema
from entropykv.llamacpp.schema_limits import check_written_out

_CHAT = inspect.signature(llama_cpp.Llama.create_chat_completion)


def checked_schemas(llama: llama_cpp.Llama, *given: Any, **named: Any) -> dict[str, Any]:
    """Return the arguments of create_chat_completion() by name, with a grammar instead of a schema.

    The schema of response_format is converted to a grammar here. Schemas of tools are checked if
    the chat format makes grammars from them. Raises SettingsError for a schema beyond the limits.
    """
    arguments = dict(_CHAT.bind(llama, *given, **named).arguments)
    del arguments["self"]
    asked = arguments.get("response_format")
    if isinstance(asked, dict) and asked.get("type") == "json_object" and "schema" in asked:
        arguments["grammar"] = LlamaGrammar.from_string(
            grammar_of_schema(asked["schema"]), verbose=False
        )
        del arguments["response_format"]
    choice = arguments.get("tool_choice") or arguments.get("function_call")
    if choice is not None or "function" in str(llama.chat_format):
        for tool in arguments.get("tools") or arguments.get("functions") or ():
            check_written_out(tool.get("function", tool).get("parameters"))
    return arguments
