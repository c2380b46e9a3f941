// What a model thinks before it answers, apart from the answer.

const TAGS = [["<think>", "</think>"], ["<thinking>", "</thinking>"], ["<thought>", "</thought>"], ["[THINK]", "[/THINK]"],
  ["<|channel>thought", "<channel|>"], ["<|begin_of_thought|>", "<|end_of_thought|>"]];

/** {thought, answer, thinking}: `thought` null where there is none; `thinking` while it has no end. Of a text that is `live`, what may
 * become such a beginning is kept back. Where the prompt has the beginning already, the text has only the end. */
export function splitThoughts(text, live) {
  const begin = text.trimStart();
  for (const [open, close] of TAGS) {
    if (begin.startsWith(open)) {
      const end = begin.indexOf(close);
      if (end < 0) return { thought: begin.slice(open.length, live ? begin.length - begunAtEnd(begin, close) : undefined).trim(), answer: "", thinking: live };
      return { thought: begin.slice(open.length, end).trim(), answer: begin.slice(end + close.length).trimStart(), thinking: false };
    }
    if (live && begin && open.startsWith(begin)) return { thought: null, answer: "", thinking: false };
  }
  const early = TAGS.map(([open, close]) => [text.indexOf(close), open, close]).find(([at, open]) => at > 0 && !text.slice(0, at).includes(open));
  if (early && !text.slice(0, early[0]).includes("`")) {
    return { thought: text.slice(0, early[0]).trim(), answer: text.slice(early[0] + early[2].length).trimStart(), thinking: false };
  }
  return { thought: null, answer: text, thinking: false };
}

function begunAtEnd(text, tag) {
  for (let count = Math.min(tag.length - 1, text.length); count > 0; count -= 1) if (text.endsWith(tag.slice(0, count))) return count;
  return 0;
}
