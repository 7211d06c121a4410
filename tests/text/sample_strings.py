"""Many strings, the same on every run: what users and models write, and what breaks tokenizers."""

from __future__ import annotations

import random

SAMPLES = [
    "",
    " ",
    "\n",
    "  two leading spaces",
    "trailing spaces   ",
    "tabs\tand\r\nline ends\r\n\r\n",
    "Hello, world! It's what they'd've said; we'll see. I'M SURE YOU'RE RIGHT",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }',
    "SELECT * FROM users WHERE id IN (1, 22, 333, 4444);",
    '{"key": [1, 2.5, -3e10, null, true], "π": "\\u03c0"}',
    "3.14159 1,000,000 2024-11-15T03:17:21Z 0xDEADBEEF ½ ² ³ ٣ ४ Ⅷ ①",
    "naïve façade Ångström e\u0301 A\u030a n\u0303",
    "Привет, мир! Как дела?",
    "你好，世界！这是一个测试。",
    "日本語のテキストとカタカナ ー",
    "한국어 텍스트입니다",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇸 ❤️ 😀😀😀",
    "a\u200bb\u00a0c\u2003d\u3000e\ufeff",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b\x7f\x85",
    "x" * 300,
    " " * 70 + "deep",
    "\n" * 20,
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "<s>[INST] hi [/INST]</s> <0x0A> ▁already▁marked",
    "https://example.org/a/b?c=d&e=%20f#g user@example.org",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$",
]

_FRAGMENTS = [
    *"abcxyzABCXYZ0123456789 .,;:!?'\"()[]{}<>@#$%^&*-_=+/\\|`~",
    *["the", " and", " of", "ing", "'s", "'LL", " I", "Mc", "12", "2024", "   ", "\n", "\n\n", "\t", "\r\n", " \n "],
    *[
        "é",
        "e\u0301",
        "ß",
        "œ",
        "ı",
        "ſ",
        "Я",
        "я",
        "ё",
        "λ",
        "中",
        "国",
        "の",
        "ひ",
        "カ",
        "한",
        "글",
        "ع",
        "ש",
        "ह",
        "ि",
    ],
    *["😀", "👍🏽", "👩‍💻", "🇫🇷", "\ufe0f", "\u200d", "\u00a0", "\u2028", "²", "½", "٣", "Ⅷ", "—", "…", "“", "’", "€"],
    *["return ", "self.", "def ", "==", "!=", "->", "::", "//", "/*", "</", "/>", "{{", "}}", "%d", "\\n", "0x"],
]


def random_strings(count: int, seed: int = 20241115) -> list[str]:
    """Mixed fragments, and runs of any code point that is a character."""
    rng = random.Random(seed)
    strings: list[str] = []
    for index in range(count):
        length = rng.choice([1, 2, 3, 5, 8, 13, 40])
        if index % 4:
            strings.append("".join(rng.choices(_FRAGMENTS, k=length)))
        else:
            limit = rng.choice([0x80, 0x250, 0x3000, 0xD800])
            strings.append("".join(chr(rng.randrange(limit)) for _ in range(length)))
    return strings
