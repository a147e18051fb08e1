"""Show the server's OpenAPI description at /docs, without scripts or the internet."""

from __future__ import annotations

import json
from typing import Any

import jinja2

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ info.title }} {{ info.version }}</title>
<style>
body { font-family: sans-serif; line-height: 1.4; max-width: 60rem; margin: auto; padding: 1rem }
summary { cursor: pointer; padding: .3rem 0 }
code, pre { font-family: monospace }
pre { background: #f4f4f4; color: #222; overflow-x: auto; padding: .6rem }
</style>
</head>
<body>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>{{ info.description }} The same as JSON: <a href="openapi.json">openapi.json</a>.</p>
{% for tag, operations in groups %}
<h2>{{ tag }}</h2>
{% for operation in operations %}
<details>
<summary><code><b>{{ operation.method }}</b> {{ operation.path }}</code></summary>
{% if operation.description %}<p>{{ operation.description }}</p>{% endif %}
{% if operation.body %}<p>Body:</p><pre>{{ operation.body }}</pre>{% endif %}
<p>Answers: {{ operation.answers | join(", ") }}</p>
</details>
{% endfor %}
{% endfor %}
<h2>Schemas</h2>
{% for name, schema in schemas %}
<details><summary><code>{{ name }}</code></summary><pre>{{ schema }}</pre></details>
{% endfor %}
</body>
</html>
"""


def docs_page(description: dict[str, Any]) -> str:
    """Return the HTML page of an OpenAPI description."""
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            entry = _entry(path, method, operation)
            groups.setdefault(operation.get("tags", ["Others"])[0], []).append(entry)
    schemas = description.get("components", {}).get("schemas", {})
    return template.render(
        info=description["info"],
        groups=groups.items(),
        schemas=[(name, json.dumps(schema, indent=2)) for name, schema in schemas.items()],
    )


def _entry(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    return {
        "path": path,
        "method": method.upper(),
        "summary": operation.get("summary", ""),
        "description": operation.get("description", ""),
        "body": json.dumps(content, indent=2) if content else "",
        "answers": list(operation.get("responses", {})),
    }
