"""What the published models are asked: thirty conversations for those with a chat template, and
thirty beginnings of texts for the base model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Messages = list[dict[str, Any]]


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def turns(*contents: Any, system: Any = None) -> Messages:
    """The user and the assistant by turns, the user first; a list of strings is one of text
    parts.
    """
    roles = ["user", "assistant"] * len(contents)
    stated = list(zip(roles, contents))  # noqa: B905
    if system is not None:
        stated.insert(0, ("system", system))
    return [
        {"role": role, "content": content if isinstance(content, str) else [*map(part, content)]}
        for role, content in stated
    ]


CODE = """\
def fibonacci(n):
\tif n < 2:
\t\treturn n
\treturn fibonacci(n - 1) + fibonacci(n - 2)
"""
LETTER = (
    "Dear neighbours,\r\n\r\nthe lift will be repaired on Tuesday between 9:00 and 15:30. "
    "Please use the stairs.\r\n\r\nYours,\r\nthe caretaker"
)
STORY = (
    "The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, "
    "so suddenly that Alice had not a moment to think about stopping herself before she found "
    "herself falling down a very deep well."
)
TABLE = "| fruit | price |\n|---|---|\n| apple | 2 |\n| pear | 3 |"

CONVERSATIONS: dict[str, Messages] = {
    "question": turns("What is the capital of France?"),
    "list": turns("Name three primary colours."),
    "facts": turns("Write three short facts about the moon."),
    "translation": turns("Translate 'good morning' to Spanish."),
    "numbers": turns("List the numbers from 1 to 15, separated by commas."),
    "definition": turns("Explain what an API is in one sentence."),
    "sum": turns("1+1="),
    "accents and emoji": turns("Café déjà vu — 123 😊, what language is this?"),
    "joined emoji": turns("What do 👩‍👩‍👧 and 🏳️‍🌈 show?"),
    "japanese": turns("日本語で挨拶してください。"),
    "arabic": turns("ما هي عاصمة مصر؟"),
    "russian": turns("Напиши одно предложение о погоде."),
    "spaces": turns("  leading and trailing spaces  "),
    "line breaks": turns("one\n\n\ntwo\n three\n"),
    "carriage returns": turns(f"Summarize this letter in one sentence.\r\n\r\n{LETTER}"),
    "code request": turns("Write a Python function that adds two numbers.\n\n```python\n"),
    "code": turns(f"What does this function return for n = 5?\n\n```python\n{CODE}```"),
    "json": turns('What is the value of "b"?\n{"a": [1, 2, 3], "b": {"c": null}}'),
    "html": turns("Close the tags: <ul><li>hello</li><li><b>world"),
    "table": turns(f"Which fruit costs more?\n\n{TABLE}"),
    "story": turns(f"Where did Alice fall?\n\n{STORY}"),
    "system": turns("Who are you?", system="You are a pirate. Answer in one short sentence."),
    "one part": turns(["What colour is the sky?"]),
    "two parts": turns(["Give me a synonym for", "happy."]),
    "parts in code": turns(
        ["What does this print?", "```python\nprint('a' * 3)\n```", "Be brief."]
    ),
    "system part": turns("What is 7 times 8?", system=["You are a teacher of mathematics."]),
    "two turns": turns("My name is Ada.", "Hello, Ada! How can I help?", "What is my name?"),
    "turns in parts": turns(
        ["I live", "in Lisbon."], ["That is a beautiful city."], ["In which country", "is it?"]
    ),
    "many turns": turns(
        "Let us count. One.", "Two.", "Three.", "Four.", "Five.", "Six.", "And the next one?"
    ),
    "all of it": turns(
        ["Qu'est-ce que c'est ?", "🥐"],
        "C'est un croissant.",
        ["And in English?", "One word: `croissant` or `bread` 🍞?"],
        system=["Answer in the language of the question.", "Use few words."],
    ),
}

TEXTS: dict[str, str] = {
    "capital": "The capital of France is",
    "count": "One, two, three, four, five,",
    "alphabet": "a b c d e f g",
    "fairy tale": "Once upon a time, in a small village by the sea, there lived",
    "story": STORY,
    "science": "Water boils at 100 degrees Celsius because",
    "history": "In 1969, the first human being to walk on the moon was",
    "definition": "Photosynthesis is the process by which",
    "list": "Shopping list:\n- bread\n- milk\n-",
    "table": f"{TABLE}\n| plum |",
    "python": f"{CODE}\n\ndef factorial(n):\n",
    "javascript": "function add(a, b) {\n  return",
    "html": "<ul>\n  <li>one</li>\n  <li>two</li>\n",
    "json": '{"name": "Ada", "age": 36, "city": "London", "languages": [',
    "sql": "SELECT name, age FROM people WHERE",
    "shell": "$ ls -l\ntotal 12\n-rw-r--r-- 1 ada ada",
    "letter": LETTER,
    "question and answer": "Q: What is the largest planet?\nA:",
    "french": "Bonjour, je m'appelle Claire et j'habite",
    "german": "Der schnelle braune Fuchs springt über",
    "spanish": "El perro corre por el parque y",
    "russian": "Москва — столица",
    "japanese": "東京は日本の",
    "chinese": "北京是中国的",
    "arabic": "القاهرة هي عاصمة",
    "hindi": "दिल्ली भारत की",
    "emoji": "I love pizza 🍕, sushi 🍣 and 👩‍🍳",
    "mathematics": "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "spaces": "  two  spaces  between  words  and",
    "poem": "Roses are red,\nviolets are blue,\n",
}


def as_strings(messages: Sequence[dict[str, Any]]) -> Messages:
    """The same with the texts of parts joined by a line break, for templates that read strings."""
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": "\n".join(p["text"] for p in message["content"])}
        for message in messages
    ]
