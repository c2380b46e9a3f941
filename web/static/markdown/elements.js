// Tokens of Markdown as elements. None but these, and of their attributes only what is set here.

import { el } from "../shared/dom.js";
import { codeBlock } from "./code.js";
import { formula } from "./math.js";

const LISTS = new Set(["UL", "OL"]);
const PLAIN = new Set(["p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "li", "blockquote", "em", "strong", "s", "thead", "tbody", "tr"]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const TASK = /^\[([ xX])\][ \t]/;
const ALIGNED = { "text-align:left": "left", "text-align:center": "middle", "text-align:right": "right" };

/** `live`: the last of them is still being written. */
export function elementsOf(tokens, live) {
  const root = document.createDocumentFragment();
  build(tokens, root, live);
  return [...root.childNodes];
}

function build(tokens, root, live) {
  const stack = [root];
  for (const token of tokens) {
    if (token.nesting < 0) {
      if (!token.hidden) stack.pop();
    } else if (token.nesting > 0) {
      if (token.hidden) continue; // a paragraph in a list without blank lines
      const [outer, inner] = opened(token);
      if (token.block && hasOwnDirection(outer, stack.at(-1))) outer.dir = "auto";
      stack.at(-1).append(outer);
      stack.push(inner);
    } else leaf(token, stack.at(-1), live);
  }
}

/** Whether a block is read from left to right or the other way by its own first letter: a browser looks for that in all of a block
 * but the blocks in it that have a direction of their own. So items and cells have none; markdown.css orders their words. */
const hasOwnDirection = (block, parent) => parent.nodeType === Node.DOCUMENT_FRAGMENT_NODE || (LISTS.has(block.nodeName) && parent.nodeName === "LI");

/** [what is put, what the next ones go into]. */
function opened(token) {
  if (token.type === "table_open") {
    const table = el("table");
    return [el("div", { class: "table", tabIndex: 0, role: "group", "aria-label": "Table" }, table), table];
  }
  if (token.tag === "a") {
    const made = link(token.attrGet("href"), token.attrGet("title"));
    if (token.markup === "linkify") made.dir = "ltr"; // an address
    return [made, made];
  }
  if (token.tag === "ol") return Array(2).fill(el("ol", { start: Number(token.attrGet("start") ?? 1) }));
  if (token.tag === "th" || token.tag === "td") return Array(2).fill(el(token.tag, { class: ALIGNED[token.attrGet("style")] ?? null, scope: token.tag === "th" ? "col" : null }));
  return Array(2).fill(el(PLAIN.has(token.tag) ? token.tag : "span"));
}

function leaf(token, parent, live) {
  switch (token.type) {
    case "inline": inline(token.children, parent); break;
    case "fence": parent.append(codeBlock(token.content, token.info.trim().split(/\s/)[0], live)); break;
    case "code_block": parent.append(codeBlock(token.content, "", live)); break;
    case "math_block": case "math_inline": parent.append(formula(token.content, token.meta)); break;
    case "hr": parent.append(el("hr")); break;
    case "softbreak": case "hardbreak": parent.append(el("br")); break; // receipts, signs and poems are read line by line
    case "code_inline": parent.append(el("code", { dir: "ltr" }, token.content)); break;
    case "image": parent.append(link(token.attrGet("src"), token.attrGet("title"), token.content || token.attrGet("src"))); break; // never fetched: a stranger would learn of it
    case "text": case "text_special": parent.append(token.content); break;
    default: // an address by its name, which is nothing to see
  }
}

function inline(tokens, parent) {
  const task = parent.nodeName === "LI" || (parent.nodeName === "P" && parent.parentNode?.nodeName === "LI" && parent === parent.parentNode.firstChild)
    ? TASK.exec(tokens[0]?.content ?? "") : null;
  if (task) {
    const done = task[1] !== " ";
    tokens[0].content = tokens[0].content.slice(task[0].length);
    (parent.nodeName === "LI" ? parent : parent.parentNode).classList.add("task");
    parent.append(el("span", { class: `tick${done ? " done" : ""}`, role: "img", "aria-label": done ? "Done" : "To do" }), " ");
  }
  build(tokens, parent, false);
}

/** To the web or to mail, without a word about the page it is on; its words alone where it leads elsewhere. */
function link(href, title, ...words) {
  let scheme = "";
  try {
    scheme = new URL(href).protocol;
  } catch {
    // relative, so not meant for this page
  }
  if (!SCHEMES.has(scheme)) return el("span", {}, ...words);
  return el("a", { href, title, target: "_blank", rel: "noopener noreferrer nofollow" }, ...words);
}
