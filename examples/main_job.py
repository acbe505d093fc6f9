"""The main job (`make run`): a small agent on the embedded model. One report, several questions about it, a vote, a follow-up.

    report ─┬─ question 1 ── answer ── follow-up ── answer
            ├─ question 2 ── answer                              everything left of a fork is computed once:
            ├─ question 3 ── answer                              the table at the end says how much that saved
            ├─ a claim ──┬─ vote 1 … vote 5 ── majority
            └─ a form to fill in ── JSON that its schema accepts; what the schema dictates is not asked of the model

Fixed seed, so the same words on every run and every CPU of a kind. Options: python examples/main_job.py --help
"""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from collections import Counter

import phloem as ph

REPORT = """\
Harbour log of the research station at Skarn Island, written by the station keeper, Ida Vestergaard, for the week of 3 March.

Monday. The supply boat Merganser arrived at 07:40 with diesel, flour, two crates of oranges and the new anemometer. Captain Olsen
stayed for coffee and left again before noon because the wind was rising from the north-west. We carried the crates up the path in
four trips. The old anemometer had frozen twice in February, so the new one was mounted on the roof of the boathouse the same day.

Tuesday. Storm. The new anemometer showed gusts of 31 metres per second at 02:15, the strongest since the station opened in 1998. The
roof of the hen house came off and was found behind the church. All eleven hens are alive and now live in the laundry room. Nobody
was hurt. The generator ran without a stop for nineteen hours.

Wednesday. Calm and grey. Tomas repaired the hen house with planks from the old jetty. Dr. Amara Nwosu counted seals from the
lighthouse: 214 grey seals and 9 harbour seals, which is forty more than in the same week of last year. She thinks that the seals come
because the herring have moved closer to the island. In the evening we ate oranges and played cards; Tomas won.

Thursday. The radio failed in the morning. The fault was a corroded plug, and replacing it took ten minutes, but finding it took five
hours. Dr. Nwosu took water samples at six points around the island. The water was 4.1 degrees Celsius, warmer than the average of
3.2 degrees for March.

Friday. A visiting student, Lena Brandt, arrived by helicopter to study lichens. She is allergic to oranges, so the rest of the oranges
went to the hens, who were not interested. The diesel tank is at 62 per cent. Next supply boat: Monday, 17 March."""

CONTEXT = f"""{REPORT}

Questions about the log, answered in a few words.

Q: Who wrote the log?
A: Ida Vestergaard, the station keeper.

Q: Which day was stormy?
A: Tuesday.
"""
QUESTIONS = (
    "What is the name of the supply boat?",
    "How many grey seals were counted on Wednesday?",
    "Why did the radio fail?",
    "What did Lena Brandt come to study?",
)
FOLLOW_UP = "When does the next supply boat come?"
CLAIM = "Was anybody hurt in the storm? Yes or no?"
VOTES = 5
FORM = "Who wrote the log, where, and how many grey seals were counted? Answer as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "author": {"type": "string", "maxLength": 30},
        "island": {"type": "string", "maxLength": 30},
        "grey_seals": {"type": "integer", "minimum": 0, "maximum": 9999},
        "stormy_day": {"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]},
        "anybody_hurt": {"type": "boolean"},
    },
    "required": ["author", "island", "grey_seals", "stormy_day", "anybody_hurt"],
    "additionalProperties": False,
}


class Table:
    """One line a stage: what was asked of the engine, and what it had to compute for that."""

    def __init__(self, engine: ph.Engine) -> None:
        self.engine, self.rows = engine, list[tuple[str, ...]]()
        self.start()

    def start(self) -> None:
        self.before, self.clock = self.engine.stats(), time.perf_counter()

    def add(self, stage: str, outputs: list[ph.Output]) -> None:
        seconds, now = time.perf_counter() - self.clock, self.engine.stats()
        prompt = sum(o.usage.prompt_tokens for o in outputs)
        drawn = sum(o.usage.completion_tokens for o in outputs)
        computed = now.prefill_tokens - self.before.prefill_tokens
        self.rows.append(
            (stage, f"{prompt}", f"{computed}", f"{prompt - computed}", f"{drawn}", f"{now.pages_tree + now.pages_live}", f"{seconds:.2f}",
             f"{(computed + drawn) / seconds:.0f}")
        )  # fmt: skip
        self.start()

    def __str__(self) -> str:
        head = ("stage", "prompt tokens", "computed", "reused", "generated", "pages", "seconds", "tok/s")
        widths = [max(len(row[i]) for row in (head, *self.rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in (head, *self.rows)
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        return "\n".join(lines)


def ask(question: str, after: str = CONTEXT) -> str:
    return f"{after}\nQ: {question}\nA:"


def say(label: str, text: str) -> None:
    print(textwrap.fill(f"{label}  {' '.join(text.split())}", width=110, subsequent_indent=" " * (len(label) + 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", help="a directory, a .gguf file or org/name; default: the embedded model")
    parser.add_argument("--device", default="auto", help="auto, cpu or reference")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()

    start = time.perf_counter()
    with ph.Engine(options.model, device=options.device, seed=options.seed) as engine:
        print(f"{engine!r}, loaded in {time.perf_counter() - start:.1f} s")
        for line in engine.resolved.arithmetic:
            print(f"  {line}")
        table = Table(engine)

        print("\nFour questions, forked from one report:")
        greedy = ph.SamplingParams(temperature=0, max_tokens=24, stop=("\n",))
        answers = engine.generate([ask(q) for q in QUESTIONS], greedy)
        for question, answer in zip(QUESTIONS, answers):
            say("  Q", question)
            say("  A", answer.text)
        table.add("4 questions", answers)

        print("\nA follow-up to the first; all that was said is in the tree:")
        so_far = f"{ask(QUESTIONS[0])}{answers[0].text}\n"
        follow_up = engine.generate(ask(FOLLOW_UP, so_far), greedy)
        say("  Q", FOLLOW_UP)
        say("  A", follow_up.text)
        table.add("follow-up", [follow_up])

        print(f"\nA vote of {VOTES} samples, each one token, yes or no:")
        yes, no = (engine.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" Yes", " No"))
        one_word = ph.SamplingParams(max_tokens=1, allowed_token_ids=(yes, no), seed=options.seed)
        votes = engine.generate(ask(CLAIM), one_word, n=VOTES)
        words = [vote.text.strip().lower() for vote in votes]
        winner, count = Counter(words).most_common(1)[0]
        say("  Q", CLAIM)
        say("  A", f"{', '.join(words)}: the majority says {winner!r} ({count} of {VOTES})")
        table.add(f"vote, n={VOTES}", votes)

        print("\nA form, filled in as JSON under its schema:")
        form = engine.generate(
            ask(FORM),
            ph.SamplingParams(temperature=0, max_tokens=96),
            json_schema=SCHEMA,
            json_whitespace="spaced",
            trusted=True,
        )
        say("  A", form.text)
        fields = json.loads(form.text)
        share = form.usage.forced_tokens / form.usage.completion_tokens
        say("   ", f"{len(fields)} fields, {form.usage.completion_tokens} tokens; the schema dictated {share:.0%} of them.")
        table.add("JSON form", [form])

        engine.check()
        print(f"\n{table}")
        stats = engine.stats()
        share = stats.cached_tokens / max(1, stats.cached_tokens + stats.prefill_tokens)
        print(
            f"\n{stats.prefill_tokens} prompt tokens computed in {stats.steps} steps; {share:.0%} of what was asked for came from the tree."
        )


if __name__ == "__main__":
    main()
