"""Emphasis beside Chinese, Japanese and Korean text, by the CJK-friendly amendments of CommonMark:
github.com/tats-u/markdown-cjk-friendly, specification.md.
"""

from __future__ import annotations

import re
import unicodedata

import pytest

WIDE = ("W", "F", "H")
# Wide since Unicode 16, which the `unicodedata` of this Python may not know yet.
WIDE_SINCE_16 = (
    *range(0x2630, 0x2638),
    *range(0x268A, 0x2690),
    *range(0x4DC0, 0x4E00),
    *range(0x1D300, 0x1D357),
    *range(0x1D360, 0x1D377),
)
CLASSES = """async (runs) => {
    const { isCjk } = await import("./MODULE");
    const differ = [];
    for (const [first, last, wide] of runs)
        for (let code = first; code <= last; code += 1) {
            const character = String.fromCodePoint(code);
            const expected = /\\p{Script=Hangul}/u.test(character) || (wide && !/\\p{Emoji_Presentation}/u.test(character));
            if (isCjk(character) !== expected) differ.push([code, wide]);
        }
    return differ;
}"""


def strong(text):
    """Write `<b>` for what is strong, `<i>` for what is slanted, `<s>` for what is struck out."""
    for long, short in (("strong", "b"), ("em", "i")):
        text = re.sub(rf"<(/?){long}>", rf"<\1{short}>", text)
    return re.sub(r"<(?!/?[bis]>)[^>]*>", "", text)


# The rules of the specification's section 6.2, each with sentences of its own.
CASES = [
    # followed, or preceded, by a CJK punctuation character: it counts as a letter (2a)
    ("他说：**“你好。”**然后走了。", "他说：<b>“你好。”</b>然后走了。"),
    ("含**「重点」**内容", "含<b>「重点」</b>内容"),
    ("**该星号不会被识别。**这是下一句。", "<b>该星号不会被识别。</b>这是下一句。"),
    ("これは**（注記）**です", "これは<b>（注記）</b>です"),
    ("**Markdown（マークダウン）**は軽量です。", "<b>Markdown（マークダウン）</b>は軽量です。"),
    ("**「重要」**です。これは**強調**です", "<b>「重要」</b>です。これは<b>強調</b>です"),
    ("合計**￥1,200**です", "合計<b>￥1,200</b>です"),
    ("番号は**③**です", "番号は<b>③</b>です"),
    ("**안녕하세요(hello)**라고 말했다", "<b>안녕하세요(hello)</b>라고 말했다"),
    ("그는 **“네.”**라고 했다", "그는 <b>“네.”</b>라고 했다"),
    ("ᄒ**(h)**ᅡ", "ᄒ<b>(h)</b>ᅡ"),
    # followed by other punctuation and preceded by a CJK character (2b gamma), and the other way
    ('彼は**"はい"**と言った', '彼は<b>"はい"</b>と言った'),
    ("使い方は**`git push`**です", "使い方は<b>git push</b>です"),
    ("詳しくは**[こちら](https://example.com)**を参照", "詳しくは<b>こちら</b>を参照"),
    ("値は**-5**度", "値は<b>-5</b>度"),
    ("言語は**C#**と**F#**です", "言語は<b>C#</b>と<b>F#</b>です"),
    ("她说*（轻声）*好", "她说<i>（轻声）</i>好"),
    ("漢***（字）***漢", "漢<i><b>（字）</b></i>漢"),
    # characters beyond the first 65,536, and selectors of a form
    ("𠮷**(よし)**野家", "𠮷<b>(よし)</b>野家"),
    ("𠮷野家**(吉)**𠮷", "𠮷野家<b>(吉)</b>𠮷"),
    ("葛\U000e0100**(かつら)**城", "葛\U000e0100<b>(かつら)</b>城"),
    ("塚\ufe00**(塚)**本", "塚\ufe00<b>(塚)</b>本"),
    ("**“\ufe01引用”\ufe01**Hub", "<b>“\ufe01引用”\ufe01</b>Hub"),
    ("a**㊗\ufe0ea**a", "a<b>㊗\ufe0ea</b>a"),
    # strikethrough and underscores
    ("価格は~~（旧）~~新", "価格は<s>（旧）</s>新"),
    ("a~~a()~~あ", "a<s>a()</s>あ"),
    ("𩸽~~()a~~a", "𩸽<s>()a</s>a"),
    ("注意：__重要__。", "注意：<b>重要</b>。"),
    ("__重要__：読む", "<b>重要</b>：読む"),
    ("漢字__強__漢字", "漢字__強__漢字"),
    ("句点。\ufe01_Traditional._", "句点。\ufe01<i>Traditional.</i>"),
    # a space where none belongs is no mark, and emoji are no CJK characters
    ("これは** 空き **です", "これは** 空き **です"),
    ("a**🈯a**a", "a**🈯a**a"),
    ("a**❌\ufe0ea**a", "a**❌\ufe0ea**a"),
    # what has no CJK character beside it stays as CommonMark has it
    ('a**"b"**c', 'a**"b"**c'),
    ("a**b**c", "a<b>b</b>c"),
    ("**a:**b", "**a:**b"),
    ("a**«b»**", "a**«b»**"),
    ("a**∇b**c", "a**∇b**c"),
    ("a~~()~~b", "a~~()~~b"),
    ("snake_case_name and 2 * 3 * 4", "snake_case_name and 2 * 3 * 4"),
    ('(**"b"**)', '(<b>"b"</b>)'),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_emphasis_beside_east_asian_text_is_emphasis(drawn, text, expected):
    assert strong(drawn.draw(text)) == expected.replace("&", "&amp;")


def test_the_classes_of_characters_are_those_of_unicode(drawn):
    """Those that this Python's Unicode has; the browser's may be newer."""
    module = drawn.module.replace("view.js", "flanking.js").split("?")[0]
    known = (c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co"))
    runs = []  # of characters that follow each other and are alike: what is passed takes a while
    for code in known:
        wide = code in WIDE_SINCE_16 or unicodedata.east_asian_width(chr(code)) in WIDE
        if runs and runs[-1][1:] == [code - 1, wide]:
            runs[-1][1] = code
        else:
            runs.append([code, code, wide])
    assert sum(last - first + 1 for first, last, _ in runs) > 140_000
    differ = drawn.page.evaluate(CLASSES.replace("MODULE", module), runs)
    assert [(hex(code), chr(code), wide) for code, wide in differ] == []


@pytest.mark.parametrize("text", [text for text, expected in CASES if expected != text])
def test_emphasis_does_not_jump_while_it_is_written(drawn, text):
    """A mark that is once drawn as emphasis stays it: no sign of it shows in between."""
    final = strong(drawn.draw(text))
    if "*" in final or "~" in final or "_" in final:
        return
    for end in range(1, len(text)):
        shown = strong(drawn.draw(text[:end], True))
        assert not re.search(r"[*~_]", shown), (text[:end], shown)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("詳しくはhttps://example.com/a_b、または", "https://example.com/a_b"),
        ("公式（https://example.com/x）をご覧", "https://example.com/x"),
        ("见 https://example.com/x。", "https://example.com/x"),
        ("见“https://example.com/x”。", "https://example.com/x"),
        ("https://ja.wikipedia.org/wiki/日本", "https://ja.wikipedia.org/wiki/%E6%97%A5%E6%9C%AC"),
        ("https://a.example/x、https://b.example/y。", "https://b.example/y"),
        ("see https://en.wikipedia.org/wiki/A_(b), ok.", "https://en.wikipedia.org/wiki/A_(b)"),
    ],
)
def test_an_address_ends_where_chinese_or_japanese_punctuation_begins(drawn, text, address):
    result = re.findall(r'<a href="([^"]*)"', drawn.draw(text))
    assert result[-1] == address and len(result) == text.count("https://")
    assert "https://、" not in drawn.draw("https://、") or "<a" not in drawn.draw("https://、")
