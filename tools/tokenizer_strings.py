"""Strings that are hard to tokenize: the same ones on every machine.

Owns the strings. Does not own what they become (make_tokenizer_goldens.py asks llama.cpp).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

_BLANKS = [" ", "\t", "\n", "\r", "\r\n", "\v", "\f"]
_BLANKS += ["\u00a0", "\u0085", "\u2003", "\u2028", "\u3000"]
_VISIBLE = """
a I the The THE hello HelloWorld camelCaseWord snake_case naïve
don't I'LL we're 's 'S ' '' y'all'd've ’s 'ſ it's'
0 7 42 123 1234 12345678901 3.14 1,000,000 ٣٤٥ १२३ ½ Ⅷ ²
. , ! ?! ... … -- — / // \\ | ` ``` # $ € < > ( ) {} [] = == += -> => @ & * ** ~ ^ % _ __
中 中文 你好，世界。 日本語 ひらがな カタカナ 한국어 각 々 〜 ！ Ａ１
Привет ΑΒγ שלום مرحبا مُحَمَّد हिन्दी क्षि ไทยแลนด์ தமிழ் ქართული Ⴀ
é Å ﬁ ß ẞ İ ı ǅ ʰ ª ѹ ꙮ 𝔘 𐐀 Ꭰꭰ Հայերեն Ⲁⲁ ⴀ Ა Ꞑꞑ ᏸ 😀 👍🏽 🇩🇪 ☃ ♥ ▁ Ġ Ċ Ā <0x0A> [UNK]
"""
_INVISIBLE = [
    *("   ", "\n\n", "\t\t", "  \n  ", "e\u0301", "A\u030a", "\u2764\ufe0f", "1\ufe0f\u20e3"),
    *("👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "🧑🏿\u200d🚀"),
    *("\u200b", "\u200d", "\ufeff", "\u00ad", "\u2060", "\x00", "\x01", "\x1b", "\x7f", "\x1c"),
    *("\ufffd", "\ue000", "\U0010ffff", "\ufffe", "\u0378"),
]
_ATOMS = [*_BLANKS, *_VISIBLE.split(), *_INVISIBLE]
_CASED = "aAbBéÉßǅ中'sStTlL1 .ʰ\u0301हि"
_CODE = [
    'def f(x: int) -> str:\n    return f"{x:>10}"  # done\n\n\nprint(f(3))\n',
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];\n\t}\n\n",
    "SELECT * FROM `t` WHERE id IN (1,2,3) AND name LIKE '%x%';--",
    '<div class="a b">\r\n  <p>Text &amp; more</p>\r\n</div>\r\n',
    'if err != nil {\n\t\treturn nil, fmt.Errorf("bad: %w", err)\n\t}',
    '{"key": [1, -2.5e-10, null], "ключ": "\\u00e9\\n"}',
    "$ curl -sSL https://example.org/a/b?c=d&e=%20 | sh -x\n# ok",
    "\\begin{equation}\n  \\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}\n\\end{equation}",
    "0xDEADBEEF 0b1010 1_000_000 1e-5 .5f 12:34:56 2024-02-30T23:59:60Z 192.168.0.1",
    "a=b+c;d--;e**f;g//h;i<<=2;j>>>3;k?.l;m??n;o!==p;q&&r||!s;t::u;v->w;x=>y",
    "| a | b |\n|---|--:|\n| 1 |  2|\n\n* [x] done\n  1. *it* **bold** `code`\n\n> quote\n",
    "#!/bin/sh\nset -eu\n\n\n\n\tif [ \"$1\" = '' ]; then\n\t\texit 1;fi\n",
]
_PROSE = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 5 o'clock; we'll've left, they'd said: \"Don't!\"",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "敏捷的棕色狐狸跳过了懒狗。2024年1月15日，气温12.5℃。",
    "いろはにほへと ちりぬるを　ＡＢＣ１２３",
    "다람쥐 헌 쳇바퀴에 타고파. 3개월",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣٤٥",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "Vôix ambiguë d’un cœur qui, au zéphyr, préfère les jattes de kiwis",
    "Tiếng Việt có nhiều dấu thanh: à á ả ã ạ, tôi ăn phở",
    "e\u0301te\u0301 and nai\u0308ve: cafe\u0301\u0323 A\u030angstro\u0308m",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "McDonald's iPhone XMLHttpRequest HTTPServer2 ÉCOLE École éCOLE straßeSTRASSE ΣΊΣΥΦΟΣ",
]
# Lone, cut short, over-long, surrogates, beyond UTF-8.
_BAD_BYTES = [
    *(b"\x80", b"\xff", b"\xbf\xbf", b"\xfe\xff", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xc3("),
    *(b"\xe2\x82x", b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xed\xa0\x80"),
    *(b"\xed\xbf\xbf", b"\xf8\x88\x80\x80\x80"),
]


def difficult_strings() -> list[bytes]:
    """About 500 strings; the last ones are no UTF-8."""
    rng = random.Random(20261121)
    texts = [*_ATOMS, *_CODE, *_PROSE, *_runs()]
    texts += ["".join(rng.choices(_ATOMS, k=rng.randint(2, 12))) for _ in range(60)]
    texts += ["".join(rng.choices(_ATOMS, k=rng.randint(12, 40))) for _ in range(60)]
    texts += ["".join(rng.choices(_CASED, k=rng.randint(5, 40))) for _ in range(30)]
    texts += [" ".join(rng.choices(_ATOMS, k=rng.randint(2, 8))) for _ in range(25)]
    texts += ["".join(rng.choices(_BLANKS, k=rng.randint(2, 9))) + "x" for _ in range(15)]
    texts += ["".join(rng.choices("abcXYZ'éÉ中1 ", k=40)) for _ in range(15)]
    strings = list(dict.fromkeys(text.encode() for text in texts))
    return strings + _damaged(rng)


def _runs() -> list[str]:
    texts = [char * n for char in " \t\n" for n in (2, 3, 5, 8, 15, 16, 17, 33, 64, 100)]
    texts += [" " * n + "x" + " " * n + "\n" for n in (1, 2, 4, 7, 16, 31)]
    texts += [char * n for char in ("=", "-", "a", "A", "1", "中", "é", "🙂", ".") for n in (7, 70)]
    return [*texts, "\r\n" * 5, "\n \n  \n   \n", "ab" * 200, "Donaudampfschifffahrt" * 6, "\0\0\0"]


def _damaged(rng: random.Random) -> list[bytes]:
    strings = [b"ab " + bad + b" cd" for bad in _BAD_BYTES]
    strings += [bad + b"\n" + bad for bad in _BAD_BYTES]
    for _ in range(20):
        words = [rng.choice([*_BAD_BYTES, b"word", b" ", "é中".encode()]) for _ in range(8)]
        strings.append(b"".join(words))
    return strings


def special_strings(special: Sequence[str]) -> list[bytes]:
    """Forty texts with a vocabulary's special tokens in them, whole and in part."""
    rng = random.Random(20261122)
    some = list(special) if len(special) <= 24 else rng.sample(list(special), 24)
    words = [
        "",
        " ",
        "\n",
        " hello",
        "world",
        "  \n",
        "12",
        "<|",
        "|>",
        "é",
        "<s>",
        "</s>",
        "<unk>",
    ]
    texts = [f"{a}{b}{a}" for a, b in zip(some, rng.choices(words, k=len(some)), strict=True)]
    while len(texts) < 38:
        texts.append(
            "".join(rng.choice(some if i % 2 else words) for i in range(rng.randint(2, 9)))
        )
    strings = [text.encode() for text in texts[:38]]
    return [*strings, b"\xe4" + some[0].encode() + b"\xff x", some[-1].encode()[:-1] + b"\x80"]
