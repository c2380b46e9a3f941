// Where `*`, `_` and `~` begin or end emphasis: CommonMark's rule with the amendments of the CJK-friendly specification
// (github.com/tats-u/markdown-cjk-friendly). Chinese, Japanese and Korean stand without spaces around them, so their punctuation
// counts as letters, and other punctuation beside them as if a space stood there.

const CJK = /^(?!\p{Emoji_Presentation})(?:\p{Script=Hangul}|[\u1100-\u11ff\u20a9\u2329\u232a\u2630-\u2637\u268a-\u268f\u2e80-\u303e\u3041-\u3247\u3250-\ua4c6\uf900-\ufaff\ufe10-\ufe19\ufe30-\ufe6b\uff01-\uffee\u{16fe0}-\u{1b2fb}\u{1d300}-\u{1d376}\u{1f200}-\u{1f265}\u{20000}-\u{3fffd}])/u;
const IDEOGRAPHIC_SELECTOR = /^[\u{e0100}-\u{e01ef}]/u;
const SELECTOR = /^[\ufe00-\ufe0e]/; // the form of the character before it; not U+FE0F, which makes an emoji of it
const FULLWIDTH_QUOTE = /^[\u2018\u2019\u201c\u201d]\ufe01/;
const PUNCTUATION = /^[\p{P}\p{S}]/u;
const SPACE = /^[\p{Zs}\t\n\f\r]/u;

/** Whether `character` is one of Chinese, Japanese or Korean: wide in East Asian text and no emoji, or Hangul. */
export const isCjk = (character) => CJK.test(character);

/** {opens, closes} of the run of one sign from `start` to `end` in `text`. `inWords`: the sign counts within words, too, as `*` and `~` do. */
export function flanking(text, start, end, inWords) {
  const before = sequenceBefore(text, start);
  const after = end < text.length ? String.fromCodePoint(text.codePointAt(end)) : " ";
  const fullwidth = CJK.test(before) || IDEOGRAPHIC_SELECTOR.test(before) || FULLWIDTH_QUOTE.test(before);
  const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
  const [signBefore, signAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
  const [foreignBefore, foreignAfter] = [signBefore && !fullwidth, signAfter && !CJK.test(after)];
  const left = !spaceAfter && (!foreignAfter || spaceBefore || signBefore || fullwidth);
  const right = !spaceBefore && (!foreignBefore || spaceAfter || signAfter || CJK.test(after));
  return { opens: left && (inWords || !right || signBefore), closes: right && (inWords || !left || signAfter) };
}

/** The character that ends at `at`, with the selector behind it. */
function sequenceBefore(text, at) {
  const last = characterBefore(text, at);
  return SELECTOR.test(last) && at > 1 ? characterBefore(text, at - 1) + last : last;
}

function characterBefore(text, at) {
  if (at === 0) return " ";
  const wide = at > 1 && text.codePointAt(at - 2) > 0xffff;
  return text.slice(at - (wide ? 2 : 1), at);
}
