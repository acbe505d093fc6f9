"""hermes: <tool_call>⏎{"name": "f", "arguments": {…}}⏎</tool_call>, as Hermes, Qwen 2.5 and Qwen 3 write calls.

Also the form of models whose template knows no tools: it needs no token of its own.
"""

from __future__ import annotations

from phloem.runtime.text.tools.json_calls import JsonCalls, Spelling
from phloem.runtime.text.tools.template_use import TemplateUse

__all__ = ["Hermes"]


class Hermes(JsonCalls):
    def __init__(self, use: TemplateUse) -> None:
        spelling = Spelling(
            opener="<tool_call>",
            before='\n{"name": "',
            between='", "arguments": ',
            after="}\n</tool_call>",
            separator="\n",
            anywhere=True,
        )
        super().__init__("hermes", spelling, use)

    @staticmethod
    def writes(template: str) -> bool:
        """Whether a chat template writes this form. Qwen3-Coder's calls are XML inside the same tags: another form."""
        return "<tool_call>" in template and "<function=" not in template
