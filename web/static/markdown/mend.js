// The end of a text that is still being written, as it will most likely look: what is begun is taken for finished, so that nothing
// jumps when it is.

import { flanking } from "./flanking.js";

const MARKERS_ONLY = /^[ \t]*(?:[-*+_=~#|>`]{1,3}|[0-9]{1,9}[.)]?)[ \t]*$/;
const FENCE_BEGUN = /^[ \t]*(?:```|~~~)[^\n]*$/;
const RULE_ROW = /^[ \t:|-]*$/;
const MARKS = new Set(["**", "*", "__", "_", "~~"]);

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
    } else if (sign === "*" || sign === "_" || sign === "~") {
      if (isHalf(text, at, open)) return closed(text.slice(0, at), open);
      at = emphasis(text, at, open);
    } else at += 1;
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

/** Whether the text ends in signs that may be the first of several: of what ends open emphasis, or of what strikes out. */
function isHalf(text, at, open) {
  const run = runAt(text, at);
  if (at + run < text.length) return false;
  return text[at] === "~" && run === 1 || (open.some(({ mark }) => mark[0] === text[at]) && flanking(text, at, at + run, text[at] !== "_").closes);
}

function emphasis(text, at, open) {
  const run = runAt(text, at);
  const { opens, closes } = flanking(text, at, at + run, text[at] !== "_");
  const marks = run === 3 ? [text[at] + text[at], text[at]] : [text[at].repeat(run)];
  if (marks.every((mark) => MARKS.has(mark))) {
    for (const mark of marks) {
      const known = open.findLastIndex((one) => one.mark === mark);
      if (closes && known >= 0) open.length = known;
      else if (opens || at + run >= text.length) open.push({ mark, at: run === 3 && mark.length === 1 ? at + 2 : at });
    }
  }
  return at + run;
}

function closed(text, open) {
  let end = text.trimEnd();
  const ends = [];
  for (const { mark, at } of [...open].reverse()) {
    if (end.length <= at + mark.length && end.slice(at).startsWith(mark)) end = end.slice(0, at).trimEnd(); // nothing behind it yet
    else ends.push(mark);
  }
  return end + ends.join("");
}
