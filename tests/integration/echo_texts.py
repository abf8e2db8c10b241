"""Texts that have lost characters somewhere: scripts, emoji with joiners, spaces, what looks like markup, code."""

import random

FAMILY = "👩‍👩‍👧‍👦"

TEXTS = [
    # Scripts, right to left and combining ones among them.
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Pchnąć w tę łódź jeża lub ośm skrzyń fig.",
    "Nguyễn Ái Quốc viết: Không có gì quý hơn độc lập, tự do.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "Բարև աշխարհ — გამარჯობა სამყარო",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "আমি বাংলায় গান গাই · நான் தமிழ் பேசுகிறேன் · తెలుగు",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "မြန်မာဘာသာ · ភាសាខ្មែរ · ພາສາລາວ",
    "いろはにほへと ちりぬるを 色は匂へど カタカナ ｶﾀｶﾅ",
    "다람쥐 헌 쳇바퀴에 타고파",
    "北京是中国的首都，也是一座历史悠久的城市。天地玄黃，宇宙洪荒。",
    "ᚠᛇᚻ᛫ᛒᛦᚦ ᓄᓇᕗᑦ ⵜⴰⵎⴰⵣⵉⵖⵜ አማርኛ",
    "𠜎𠜱𠝹𠱓 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓂀",
    # Emoji: joiners, skin tones, flags, keycaps, variation selectors.
    f"{FAMILY} one family, {FAMILY}{FAMILY} two",
    "👍🏽👩🏿‍🚀🧑‍🤝‍🧑🏳️‍🌈🏴‍☠️🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "🇫🇷🇯🇵🇿🇦 1️⃣#️⃣ ❤️ ❤ ☺︎",
    # Composed and decomposed, what cannot be seen, and the byte order mark.
    "é e\u0301 ﬁ Å Å ǆ",
    "zero\u200bwidth\u200djoin\u200cer soft\u00adhyphen \u2060\ufeff end",
    "\ufeffmark first",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘",
    "already broken: \ufffd\ufffd.",
    # Spaces and lines.
    " leading",
    "trailing ",
    "  two  spaces   three    four",
    "\n\nlines\n\n\nand\ttabs\t\t\r\nand returns\r",
    "no-break\u00a0space thin\u2009space ideographic\u3000space",
    " ",
    "\n",
    # Code, markup, numbers, and what looks like something of the server's own.
    'def main():\n    return {"a": [1, 2, 3]}  # 注释\n',
    '{"choices": [{"delta": {"content": "\\u00e9\\n"}}]}\n\ndata: [DONE]\n\n',
    "<b>bold</b> &amp; &lt;tag&gt; <!-- comment --> <?xml?>",
    "3.14159 1,000,000 1e-9 0x1F ½ ²³ ∑∫√ £€¥₹",
    "C:\\path\\new \\u0041 \\x41 %41 ${HOME} `rm -rf` '; DROP TABLE users; --",
    "<think or not think> < think > </ think > <thin",
    "null NaN undefined \x7f",
    "“quotes” ‘single’ „low“ «guillemets» — – … ·",
]

_BLOCKS = [
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0xDFF),
    (0x2000, 0x2BFF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
    (0x20000, 0x2A6DF),
]


def random_texts(count: int, seed: int) -> list[str]:
    """Characters of all these blocks, mixed with joiners and spaces."""
    draw = random.Random(seed)
    return ["".join(_characters(draw) for _ in range(draw.randint(1, 40))) for _ in range(count)]


def _characters(draw: random.Random) -> str:
    if draw.random() < 0.2:
        return draw.choice((" ", "  ", "\n", "\u200d", "\ufe0f", FAMILY, "e\u0301", "abc "))
    return chr(draw.randint(*draw.choice(_BLOCKS)))
