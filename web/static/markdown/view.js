// A text of Markdown on the page, that may grow. Blocks behind which another one has begun are finished and not touched again; only
// the last one is made anew as it grows.

import { el } from "../shared/dom.js";
import { plural } from "../shared/format.js";
import { blocksOf, readLines } from "./blocks.js";
import { load as loadColours } from "./code.js";
import { elementsOf } from "./elements.js";
import { load as loadMath } from "./math.js";
import { mendLines, mendWords } from "./mend.js";
import { morph } from "./morph.js";
import { splitThoughts } from "./thoughts.js";

const MARKDOWN_MAX = 1 << 18; // characters; what is longer is shown as it was written
const AT_ONCE = 2048; // characters: less than a frame of work
const REFERENCES_MAX = 1 << 16;
const SLICE_MS = 12;
const REST = 3; // times as long as drawing took, until it is drawn again
const WORDS_EVERY = /\s+/;

/** Markdown in `element`. */
export class Markdown {
  constructor(kind = "text") {
    this.element = el("div", { class: kind });
    this.#begin();
  }

  #begin() {
    this.text = "";
    this.settled = 0; // characters that are drawn and will not change
    this.blocks = 0; // elements of them
    this.references = null; // addresses that stand behind their links: known once the text is whole
  }

  /** Draw `text`, which begins with what was drawn before. `live`: more may follow. `later`: called with what is left to do, if it
   * cannot be done at once. */
  draw(text, live, later = null) {
    if (!text.startsWith(this.text)) this.#clear();
    this.text = text;
    if (text.length > MARKDOWN_MAX) {
      this.element.classList.add("plain");
      this.element.replaceChildren(text);
      return;
    }
    if (text.includes("```")) loadColours();
    if (text.includes("$") || text.includes("\\(") || text.includes("\\[")) loadMath();
    if (!live && !this.references && text.length <= REFERENCES_MAX && text.includes("]:")) this.#collect(text);
    const until = performance.now() + SLICE_MS;
    let size = AT_ONCE;
    while (text.length - this.settled > size) { // a window at a time: the time for one is bounded
      const before = this.settled;
      this.#settle(text.slice(this.settled, this.settled + size));
      size = this.settled === before ? size * 2 : AT_ONCE;
      if (later && performance.now() > until) {
        later(() => { if (this.text === text) this.draw(text, live, later); });
        return;
      }
    }
    this.#settle(text.slice(this.settled));
    this.#last(text.slice(this.settled), live);
  }

  #clear() {
    this.element.replaceChildren();
    this.#begin();
  }

  /** Links whose address stands behind them are made anew. */
  #collect(text) {
    const env = { live: false, references: {} };
    blocksOf(text, env);
    if (!Object.keys(env.references).length) return;
    this.#clear();
    [this.text, this.references] = [text, env.references];
  }

  #env(live) {
    return { live, references: { ...this.references } };
  }

  /** All blocks of `text` but its last one. */
  #settle(text) {
    const groups = blocksOf(text, this.#env(true));
    if (groups.length < 2) return;
    const made = groups.slice(0, -1).flatMap(({ tokens }) => elementsOf(readLines(tokens, this.#env(false)), false));
    morph(this.element, made, this.blocks);
    this.blocks += made.length;
    this.settled += lineStart(text, groups.at(-1).line);
  }

  #last(text, live) {
    const fenced = live && blocksOf(text, this.#env(true))[0]?.tokens[0].type === "fence";
    const groups = blocksOf(live ? mendLines(text, fenced) : text, this.#env(live));
    const made = groups.flatMap(({ tokens }) => {
      const inline = live && tokens.findLast((token) => token.type === "inline");
      if (inline) inline.content = mendWords(inline.content);
      return elementsOf(readLines(tokens, this.#env(live)), live);
    });
    if (live) putCaret(made);
    morph(this.element, made, this.blocks);
  }
}

/** Behind the last word. */
function putCaret(made) {
  let at = made.at(-1);
  const caret = el("span", { class: "caret" });
  if (!at) {
    made.push(el("p", {}, caret));
    return;
  }
  if (at.classList?.contains("code")) at = at.querySelector("code");
  while (at.lastElementChild && /^(?:UL|OL|LI|P|BLOCKQUOTE|DIV|TABLE|THEAD|TBODY|TR|TH|TD)$/.test(at.lastElementChild.nodeName) && !at.lastElementChild.dataset.is) at = at.lastElementChild;
  if (at.dataset?.is || at.nodeName === "HR") made.push(el("p", {}, caret));
  else at.append(caret);
}

function lineStart(text, line) {
  let at = 0;
  for (let number = 0; number < line; number += 1) at = text.indexOf("\n", at) + 1;
  return at;
}

/** An answer: its thoughts folded, then its text. */
export class AnswerText {
  constructor() {
    this.answer = new Markdown();
    this.element = el("div", { class: "answer-text" }, this.answer.element);
    this.next = 0; // not to be drawn again before
  }

  /** `live`: more is to come. `wordsOf(answer)`: what is shown of the answer, where that is not all. */
  draw(text, live, wordsOf = (answer) => answer) {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.waiting = false;
    this.element.hidden = !text;
    const { thought, answer: whole, thinking } = splitThoughts(text, live);
    const answer = whole && wordsOf(whole);
    if (thought !== null) this.#drawThought(thought, thinking);
    this.answer.element.classList.toggle("growing", live);
    if (live) this.answer.element.classList.add("grown");
    this.answer.element.hidden = !answer;
    if (answer) this.answer.draw(answer, live, live ? null : whenIdle);
    return this;
  }

  #drawThought(text, thinking) {
    if (!this.fold) {
      this.thought = new Markdown("text thought-text");
      this.told = el("span");
      this.fold = el("details", { class: "thought" }, el("summary", {}, this.told), this.thought.element);
      this.element.prepend(this.fold);
    }
    const words = plural(text ? text.split(WORDS_EVERY).length : 0, "word");
    this.fold.classList.toggle("thinking", thinking);
    this.told.textContent = thinking ? `Thinking… ${words}` : `Thoughts, ${words}`;
    this.thought.draw(text, thinking, thinking ? null : whenIdle);
  }

  /** As often as the page can be painted, and no more often than leaves it time for other things. */
  grow(text) {
    this.grown = text;
    if (this.waiting) return;
    this.waiting = true;
    this.timer = setTimeout(() => {
      this.frame = requestAnimationFrame(() => {
        const began = performance.now();
        this.draw(this.grown, true);
        const now = performance.now();
        this.next = now + REST * (now - began);
      });
    }, Math.max(0, this.next - performance.now()));
  }
}

function whenIdle(run) {
  setTimeout(run, 0);
}

/** An answer's words without its thoughts, to be copied. */
export const answerOf = (text) => splitThoughts(text, false).answer || text;
