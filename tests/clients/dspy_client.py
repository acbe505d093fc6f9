"""dspy: a typed signature, with the chat adapter's text protocol or, on a parse failure, its JSON one."""

from __future__ import annotations

import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import dspy

URL = sys.argv[1]


def main() -> None:
    lm = dspy.LM(
        "openai/default", api_base=f"{URL}/v1", api_key="none", cache=False, max_tokens=200, temperature=0.0, num_retries=0
    )
    assert lm("Say hello.")[0]
    dspy.configure(lm=lm, adapter=dspy.JSONAdapter())

    class Judge(dspy.Signature):
        """Judge a sentence."""

        sentence: str = dspy.InputField()
        verdict: Literal["good", "bad"] = dspy.OutputField()

    assert dspy.Predict(Judge)(sentence="The sun is out.").verdict in ("good", "bad")


main()
