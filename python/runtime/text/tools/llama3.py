"""llama3: {"name": "f", "parameters": {…}} as the whole reply, as Llama 3.1 to 3.3 write calls.

A reply that begins with {"name": " is a call. Most templates of the family take one call a turn, and say so: then one is made.
"""

from __future__ import annotations

from phloem.runtime.text.tools.json_calls import JsonCalls, Spelling
from phloem.runtime.text.tools.template_use import TemplateUse

__all__ = ["Llama3"]


class Llama3(JsonCalls):
    def __init__(self, use: TemplateUse) -> None:
        single = "single tool-call" in use.source
        spelling = Spelling(
            opener='{"name": "',
            before="",
            between='", "parameters": ',
            after="}",
            separator=None if single else "; ",
            anywhere=False,
        )
        super().__init__("llama3", spelling, use)

    @staticmethod
    def writes(template: str) -> bool:
        return '"parameters": ' in template and ("<|start_header_id|>" in template or "<|python_tag|>" in template)
