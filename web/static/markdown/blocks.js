// Markdown as tokens: CommonMark with tables, strikethrough, links that are written out, and LaTeX. No HTML: a tag is text.

import MarkdownIt from "../vendor/markdown-it/markdown-it.js";
import { flanking, isCjk } from "./flanking.js";

const MATH_MAX = 4000; // characters of one formula
const DIGIT = /^[0-9]$/;
const SPACE = /^\s$/;
const INLINE_PAIRS = [["\\(", "\\)", false], ["\\[", "\\]", true], ["$$", "$$", true]];
const BLOCK_PAIRS = [["$$", "$$"], ["\\[", "\\]"]];
const ENDS_ADDRESS = /[\p{Ps}\p{Pe}“”、。，．！？：；､｡]/u; // of what is wide, and quotation marks: no space stands before them

function reader(rules) {
  const made = MarkdownIt({ html: false, linkify: true, typographer: false });
  made.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
  endLinksAtCjkPunctuation(made.linkify);
  made.inline.State = class extends made.inline.State {
    scanDelims(start, inWords) {
      let end = start;
      while (end < this.posMax && this.src[end] === this.src[start]) end += 1;
      const { opens, closes } = flanking(this.src, start, end, inWords);
      return { can_open: opens, can_close: closes, length: end - start };
    }
  };
  made.inline.ruler.before("escape", "math", inlineMath);
  made.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
  made.core.ruler.enableOnly(rules);
  return made;
}

/** An address that is written out ends before a bracket, a quotation mark or a full stop of Chinese and Japanese. */
function endLinksAtCjkPunctuation(linkify) {
  const lengthOf = linkify.testSchemaAt.bind(linkify);
  linkify.testSchemaAt = (text, schema, at) => {
    const address = text.slice(at, at + lengthOf(text, schema, at));
    let length = 0;
    for (const sign of address) {
      if (ENDS_ADDRESS.test(sign) && (isCjk(sign) || sign === "“" || sign === "”")) break;
      length += sign.length;
    }
    return address.startsWith("//") && length <= 2 ? 0 : length;
  };
}

const outer = reader(["normalize", "block"]);
const inner = reader(["inline", "linkify", "text_join"]);

/** The blocks of `text` as groups of tokens, one for each block that is in no other: {tokens, line}. `env`: {live, references}. */
export function blocksOf(text, env) {
  const groups = [];
  let depth = 0;
  for (const token of outer.parse(text, env)) {
    if (depth === 0 && token.nesting >= 0) groups.push({ tokens: [], line: token.map?.[0] ?? 0 });
    groups.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return groups;
}

/** The tokens of one block with what stands in its lines read, in place. */
export function readLines(tokens, env) {
  const state = new inner.core.State("", inner, env);
  state.tokens = tokens;
  inner.core.process(state);
  return tokens;
}

/** `$x$`, `\(x\)`, `$$x$$`, `\[x\]` in a line. Money is no formula: behind an opening $ and before a closing one stands no space,
 * and no digit behind that. One without an end is a formula that is still being written, where `env.live`. */
function inlineMath(state, silent) {
  const { src, pos, posMax } = state;
  const first = src.charCodeAt(pos);
  if (first !== 0x24 && first !== 0x5c) return false;
  const pair = INLINE_PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return first === 0x24 && dollars(state, silent);
  const [open, close, display] = pair;
  let end = src.indexOf(close, pos + open.length);
  const unfinished = end < 0 || end + close.length > posMax;
  if (unfinished && !state.env.live) return false;
  if (unfinished) end = posMax;
  const source = src.slice(pos + open.length, end).trim();
  if (!unfinished && (!source || source.length > MATH_MAX)) return false;
  if (!silent) put(state, source, display, unfinished);
  state.pos = unfinished ? posMax : end + close.length;
  return true;
}

function dollars(state, silent) {
  const { src, pos, posMax } = state;
  if (pos + 1 >= posMax || SPACE.test(src[pos + 1])) return false;
  for (let end = src.indexOf("$", pos + 1); end > 0 && end < posMax && end - pos <= MATH_MAX; end = src.indexOf("$", end + 1)) {
    if (src[end - 1] === "\\") continue;
    if (SPACE.test(src[end - 1]) || DIGIT.test(src[end + 1] ?? "")) return false;
    if (!silent) put(state, src.slice(pos + 1, end), false, false);
    state.pos = end + 1;
    return true;
  }
  return false;
}

function put(state, source, display, unfinished) {
  const token = state.push("math_inline", "", 0);
  token.content = source;
  token.meta = { display, unfinished };
}

/** Lines between `$$` and `$$`, or `\[` and `\]`, of which the first begins a line. */
function blockMath(state, startLine, endLine, silent) {
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]);
  const pair = BLOCK_PAIRS.find(([open]) => line(startLine).startsWith(open));
  if (!pair || state.sCount[startLine] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  const source = [];
  let [at, over, long] = [startLine, false, 0];
  for (; at < endLine && !over && long <= MATH_MAX; at += 1) {
    const words = line(at).slice(at === startLine ? open.length : 0);
    const end = words.indexOf(close);
    if (end >= 0 && words.slice(end + close.length).trim()) return false; // text behind it: a formula in a line
    over = end >= 0;
    source.push(over ? words.slice(0, end) : words);
    long += words.length;
  }
  if (!over && (!state.env.live || at < endLine)) return false;
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  token.block = true;
  token.content = source.join("\n").trim();
  token.map = [startLine, at];
  token.meta = { display: true, unfinished: !over };
  state.line = at;
  return true;
}
