// Blocks of code with their colours, by highlight.js, which is fetched with the first of them.

import { copyText, el, icon } from "../shared/dom.js";

const COLOURED_MAX = 20_000; // characters: some 20 ms
const COLOURED_LIVE_MAX = 4000;
const TOLD_MS = 1500;
let highlighter = null;
let loading = null;

/** Elements in place of the text that highlight.js would write. */
class Elements {
  constructor() {
    this.root = document.createDocumentFragment();
    this.stack = [this.root];
  }

  addText(text) { if (text) this.stack.at(-1).append(text); }

  openNode(scope) {
    const made = document.createElement("span");
    made.className = scope.split(".").map((part, level) => (level ? `${part}_` : `code-${part}`)).join(" ");
    this.stack.at(-1).append(made);
    this.stack.push(made);
  }

  closeNode() { this.stack.pop(); }

  startScope(scope) { this.openNode(scope); }

  endScope() { this.closeNode(); }

  __addSublanguage(other) { this.stack.at(-1).append(other.root); }

  toHTML() { return ""; }

  finalize() {}
}

/** `live`: it is still being written. */
export function codeBlock(text, language, live) {
  const code = el("code", {}, text);
  const button = el("button", { class: "copy-code", type: "button", on: { click: () => copy(button) } }, icon("copy"), el("span", {}, "Copy"));
  const made = el("figure", { class: "code", dir: "ltr" }, el("figcaption", {}, el("span", {}, language || "text"), button), el("pre", { tabIndex: 0 }, code));
  if (!language || text.length > (live ? COLOURED_LIVE_MAX : COLOURED_MAX)) return made;
  if (highlighter) colour(code, language);
  else {
    code.dataset.language = language; // for when it is there
    load();
  }
  return made;
}

/** Before there is a block to colour. */
export function load() {
  loading ??= import("../vendor/highlight/highlight.js").then((module) => {
    highlighter = module.default;
    highlighter.configure({ __emitter: Elements });
    for (const code of document.querySelectorAll("code[data-language]")) colour(code, code.dataset.language);
  }, () => { loading = null; });
}

function colour(code, language) {
  if (!highlighter.getLanguage(language)) return;
  const { root } = highlighter.highlight(code.textContent, { language, ignoreIllegals: true })._emitter;
  if (root.textContent === code.textContent) code.replaceChildren(root);
  delete code.dataset.language;
}

async function copy(button) {
  await copyText(button.closest("figure").querySelector("code").textContent);
  button.replaceChildren(icon("done"), el("span", {}, "Copied"));
  setTimeout(() => button.replaceChildren(icon("copy"), el("span", {}, "Copy")), TOLD_MS);
}
