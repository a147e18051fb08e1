"""Count, for every keyword of the JSON-Schema-Test-Suite, schemas that are refused or enforced
wrongly.

python -m tests.conformance FOLDER [--cases FILE]

FOLDER: the suite, such as json/ in the sources of the package jsonschema. Ends with 1 if an invalid
text is accepted, if a schema is refused with more than one sentence, or if valid texts are rejected
for more schemas than by llguidance with its own options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from tests.conformance.suite import DRAFTS, Case, Counts, cases, judged, with_types
from tests.support.constraints import byte_texts, schema_takes


def plain(schema: Any, *texts: str) -> list[bool]:
    """Return for each text whether llguidance accepts it under a schema, with its own options.

    Raises ValueError if llguidance refuses the schema.
    """
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    found = []
    for text in texts:
        matcher = LLMatcher(byte_texts().tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n")[0])
        data = list(text.encode())
        found.append(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
    return found


def table(every: list[Case], takes: Callable[..., list[bool]]) -> dict[str, Counts]:
    """Return, by keyword, the counts of schemas that are refused or enforced wrongly."""
    found: dict[str, Counts] = {}
    for case in every:
        found.setdefault(case.keyword, Counts()).add(judged(case, takes))
    return found


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the counts of several keywords."""
    found = Counts()
    for each in counts:
        found.add(each)
    return found


def shown(title: str, every: list[Case]) -> list[str]:
    """Print for each keyword our counts beside those of llguidance alone; return a line for each
    failure, such as more rejections than those.
    """
    ours, theirs = table(every, schema_takes), table(every, plain)
    print(f"\n{title}: schemas, refused clearly, wrongly accepted, wrongly rejected")
    for keyword, counts in (*ours.items(), ("all", total(ours.values()))):
        other = total(theirs.values()) if keyword == "all" else theirs[keyword]
        print(
            f"  {keyword:24}{counts.schemas:5}{counts.refused:5}{counts.accepted:5}"
            f"{counts.rejected:5}   llguidance alone:{other.refused:5}{other.accepted:5}"
            f"{other.rejected:5}"
        )
    wrong = total(ours.values()).failures
    if total(ours.values()).rejected > total(theirs.values()).rejected:
        wrong.append(f"{title}: more valid texts are rejected than by llguidance alone")
    return wrong


def main() -> int:
    """Judge every draft; return 1 if there is a failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--cases", type=Path, help="further schemas with texts, as JSON")
    options = parser.parse_args()
    wrong = []
    for draft in DRAFTS:
        every = list(cases(options.suite, draft))
        wrong += shown(draft, every)
        typed = [found for found in map(with_types, every) if found is not None]
        wrong += shown(f"{draft} with implied types", typed)
    if options.cases is not None:
        read = json.loads(options.cases.read_text("utf-8"))["cases"]
        texts = [[(text["text"], text["valid"]) for text in each["texts"]] for each in read]
        more = [Case(c["name"], c["schema"], t) for c, t in zip(read, texts, strict=True)]
        wrong += shown("cases", more)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
