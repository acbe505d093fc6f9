"""A character sheet by regex: every field is held to its own pattern, and the next words follow it directly.

Name: ⟨[A-Z][a-z]+⟩⏎House: ⟨…⟩⏎Born: ⟨\\d{4}⟩⏎…        a pattern ends where the model goes on with something that cannot belong to it
"""

from __future__ import annotations

from typing import Any

import phloem as ph

FIELDS = {
    "name": r"[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10})?",
    "trade": r"(fisher|baker|smith|weaver|scribe)",
    "born": r"1[3-6][0-9]{2}",
    "height": r"1\.[5-9][0-9] m",
    "motto": r"[A-Z][a-z]+( [a-z]+){2,5}\.",
}
FIELDS_CJK = {"名前": r"[一-龥]{2,4}", "性格": r"(明るい|静か|勇敢)", "好き": r"(🐟|🍞|📜){1,3}"}


@ph.function
def character_sheet(s: ph.State, about: str, fields: dict[str, str]) -> dict[str, str]:
    s += f"{about}\n\n"
    for field, pattern in fields.items():
        s += f"{field}: " + ph.gen(field, regex=pattern, max_tokens=32) + "\n"
    return {field: s[field] for field in fields}


def main(
    backend: Any, about: str = "A character sheet of a villager in a small harbour town.", fields: dict[str, str] = FIELDS
) -> ph.Run[Any]:
    return character_sheet.run(about=about, fields=fields, seed=3, temperature=0.8, backend=backend)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
