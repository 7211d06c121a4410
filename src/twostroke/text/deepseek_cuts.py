"""How DeepSeek's models cut text into words before BPE: regular expressions in turn, each on what the one before it
left. V2 and the models before it name their letters one by one."""

from __future__ import annotations

_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Those with an upper and a lower case, as code points."""
_SIGNS = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"
_CHINESE_AND_KOREAN = "4E00-9FA5 800-4E00 AC00-D7FF"
_CHINESE_AND_JAPANESE = "4E00-9FA5 3040-309F 30A0-30FF"


def _one_of(ranges: str) -> str:
    ends = ([rf"\x{{{end}}}" for end in one.split("-")] for one in ranges.split())
    return f"[{''.join('-'.join(pair) for pair in ends)}]"


_SINGLE_DIGITS = r"\p{N}"
DEEPSEEK2_CUTS = (
    r"[\r\n]",
    rf"\s?{_one_of(_LETTERS)}+",
    rf"\s?{_one_of(_SIGNS)}+",
    r"\s+$",
    rf"{_one_of(_CHINESE_AND_KOREAN)}+",
    _SINGLE_DIGITS,
)
DEEPSEEK_CODER_CUTS = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    rf"{_one_of(_CHINESE_AND_KOREAN)}+",
    _SINGLE_DIGITS,
)

# V3 cuts digits and Chinese and Japanese off first, and keeps a sign with the letters behind it.
_SIGN_AND_LETTERS = r"[!-/:-@\[-`{-~][A-Za-z]+"
DEEPSEEK3_CUTS = (
    r"\p{N}{1,3}",
    rf"{_one_of(_CHINESE_AND_JAPANESE)}+",
    rf"{_SIGN_AND_LETTERS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
