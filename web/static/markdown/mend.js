// The end of a text that is still being written, as it will most likely look: what is begun is taken for finished, so that nothing
// jumps when it is.

const MARKERS_ONLY = /^[ \t]*(?:[-*+_=~#|>`]{1,3}|[0-9]{1,9}[.)])[ \t]*$/;
const FENCE_BEGUN = /^[ \t]*(?:```|~~~)[^\n]*$/;
const RULE_ROW = /^[ \t:|-]*$/;
const DIGIT = /^[0-9]$/;
const SPACE = /^\s$/;
const CLOSED_BY = { "**": "**", "*": "*", __: "__", _: "_", "~~": "~~" };

/** Lines of the last block: a line that may become anything is kept back, and a first row is a table's. `inCode`: it is a block of
 * code, where signs mean nothing. */
export function mendLines(text, inCode) {
  const begin = text.lastIndexOf("\n") + 1;
  const last = text.slice(begin);
  if (inCode) return FENCE_BEGUN.test(last) && begin > 0 ? text.slice(0, begin) : text;
  if (FENCE_BEGUN.test(last) || MARKERS_ONLY.test(last)) return mendTable(text.slice(0, begin));
  return mendTable(text);
}

function mendTable(text) {
  const lines = text.trimEnd().split("\n");
  const head = lines.length > 1 ? lines.at(-2).trim() : "";
  if (lines.length === 1 && isRow(lines[0])) return `${lines[0]}\n${ruleFor(lines[0])}\n`;
  if (lines.length === 2 && isRow(head) && RULE_ROW.test(lines[1])) return cells(lines[1]) === cells(head) ? text : `${lines[0]}\n${ruleFor(head)}\n`;
  return text;
}

const isRow = (line) => line.trimStart().startsWith("|") && line.trim().length > 1;
const isWord = (sign) => DIGIT.test(sign) || sign.toLowerCase() !== sign.toUpperCase();

function cells(row) {
  const whole = row.trim();
  return whole.slice(whole.startsWith("|") ? 1 : 0, whole.endsWith("|") ? -1 : undefined).split("|").length;
}

const ruleFor = (row) => `|${" --- |".repeat(cells(row))}`;

/** One run of words: emphasis, code and links that are open get their end. */
export function mendWords(text) {
  const open = []; // {mark, at}
  let at = 0;
  while (at < text.length) {
    const sign = text[at];
    if (sign === "\\") {
      at += 2;
    } else if (sign === "`") {
      const run = runAt(text, at);
      const end = closingRun(text, at + run, run);
      if (end < 0) return codeOpen(text, at, run, open);
      at = end + run;
    } else if (sign === "[") {
      const link = linkOpen(text, at);
      if (link !== null) return closed(text.slice(0, at) + link, open);
      at += 1;
    } else if (sign === "*" || sign === "_" || sign === "~") at = emphasis(text, at, open);
    else at += 1;
  }
  return closed(text, open);
}

function runAt(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function closingRun(text, from, length) {
  for (let at = text.indexOf("`", from); at >= 0; ) {
    const run = runAt(text, at);
    if (run === length) return at;
    at = text.indexOf("`", at + run);
  }
  return -1;
}

function codeOpen(text, at, run, open) {
  const words = text.slice(at + run).trimEnd();
  if (!words) return closed(text.slice(0, at), open);
  const kept = words.slice(0, words.length - trailing(words, "`")); // the first of several that end it
  return closed(`${text.slice(0, at + run)}${kept || " "}${"`".repeat(run)}`, open);
}

function trailing(text, sign) {
  let count = 0;
  while (text[text.length - 1 - count] === sign) count += 1;
  return count;
}

/** What stands for a link whose end is not there: its words. null where it is whole, or none. */
function linkOpen(text, at) {
  const middle = text.indexOf("]", at);
  if (middle < 0) return text.slice(at + 1);
  if (text[middle + 1] !== "(" || text.indexOf(")", middle) > 0) return null;
  return text.slice(at + 1, middle);
}

function emphasis(text, at, open) {
  const run = runAt(text, at);
  const [before, after] = [text[at - 1] ?? " ", text[at + run] ?? " "];
  const [left, right] = [!SPACE.test(after), !SPACE.test(before)];
  const inWord = isWord(before) && isWord(after);
  if (text[at] === "~" ? run === 2 : run <= 3) {
    const marks = run === 3 ? [text[at] + text[at], text[at]] : [text[at].repeat(run)];
    for (const mark of marks) {
      const known = open.findLastIndex((one) => one.mark === mark);
      if (right && known >= 0) open.length = known;
      else if (at + run >= text.length || (left && !(inWord && mark.length === 1))) open.push({ mark, at });
    }
  }
  return at + run;
}

function closed(text, open) {
  let end = text.trimEnd();
  const ends = [];
  for (const { mark, at } of [...open].reverse()) {
    if (end.length <= at + mark.length && end.slice(at).startsWith(mark)) end = end.slice(0, at).trimEnd(); // nothing behind it yet
    else ends.push(CLOSED_BY[mark]);
  }
  const sign = ends[0]?.[0];
  if (sign && ends[0].length > trailing(end, sign) && trailing(end, sign) === 1) end = end.slice(0, -1); // half of what ends it
  return end + ends.join("");
}
