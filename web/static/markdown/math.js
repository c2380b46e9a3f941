// Formulas, by KaTeX, which is fetched with the first of them.

const SETTINGS = { throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 500, output: "htmlAndMathml" };
const waiting = new Set();
let katex = null;
let loading = null;

/** An element with a formula, or with its source until it can be drawn, or if it cannot. */
export function formula(source, { display, unfinished }) {
  const made = document.createElement(display ? "div" : "span");
  made.className = display ? "math display" : "math";
  made.dir = "ltr";
  made.dataset.is = `${display} ${unfinished} ${source}`;
  made.textContent = source;
  if (unfinished) made.classList.add("source");
  else if (katex) draw(made, source, display);
  else {
    made.classList.add("source");
    waiting.add({ made, source, display });
    load();
  }
  if (display) Object.assign(made, { tabIndex: 0 }); // may be wider than the page, and is scrolled then
  return made;
}

/** Before there is one to draw. */
export function load() {
  loading ??= Promise.all([import("../vendor/katex/katex.js"), styles()]).then(() => {
    katex = globalThis.katex;
    for (const { made, source, display } of waiting) draw(made, source, display);
    waiting.clear();
  }, () => { loading = null; }); // asked for again by the next formula
}

function styles() {
  return new Promise((resolve, reject) => {
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("../vendor/katex/katex.css", import.meta.url).href });
    link.addEventListener("load", resolve, { once: true });
    link.addEventListener("error", reject, { once: true });
    document.head.append(link);
  });
}

function draw(made, source, display) {
  try {
    const tree = katex.__renderToDomTree(source, { ...SETTINGS, displayMode: display });
    withoutStyles(tree);
    made.replaceChildren(tree.toNode());
    made.classList.remove("source");
  } catch (error) { // KaTeX's own words say where
    made.classList.add("source");
    made.title = String(error.message ?? error);
  }
}

/** MathML that is only read aloud: the page's policy has no room for its style attributes. */
function withoutStyles(node) {
  if (node.attributes) delete node.attributes.style;
  for (const child of node.children ?? []) withoutStyles(child);
}
