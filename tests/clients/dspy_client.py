"""dspy: raw text, and a typed signature by its JSON adapter, which sends the signature's schema as `response_format`."""

from __future__ import annotations

import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy

URL = sys.argv[1]


class Local(dspy.LM):
    """dspy asks a catalogue of hosted models what a model can, and `default` is in none."""

    supported_params = frozenset({"temperature", "max_tokens", "response_format"})
    supports_response_schema = True


def main() -> None:
    lm = Local(
        "openai/default", api_base=f"{URL}/v1", api_key="none", cache=False, max_tokens=200, temperature=0.0, num_retries=0
    )
    assert lm("Say hello.")[0]
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())

    class Judge(dspy.Signature):
        """Judge a sentence."""

        sentence: str = dspy.InputField()
        verdict: Literal["good", "bad"] = dspy.OutputField()

    assert dspy.Predict(Judge)(sentence="The sun is out.").verdict in ("good", "bad")
    sent = lm.history[-1]["kwargs"]["response_format"]
    assert sent is not None and sent != {"type": "json_object"}, sent  # else the small model was merely lucky


main()
