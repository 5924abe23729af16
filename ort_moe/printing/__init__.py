"""How results are told: on a terminal, as plain text, and in words.

`printable` is what they share, `listing` its tables; `wording` and the modules named after what they word make phrases.
"""
