// Boxes and points of an answer, drawn over the picture they speak of.

import { el, svg } from "../shared/dom.js";
import { imagePath, show } from "../shared/server.js";

const COLOURS = ["#e5484d", "#0b8fdb", "#2f9e44", "#c026d3", "#e8590c", "#5b5bd6", "#0c8599", "#a07000"];
const UNITS_KEY = "mtmd.units";
const WIDEST_LABEL = 28;

/** Which reading of bare numbers a person chose for this model, if any. */
export const chosenUnits = (model) => localStorage.getItem(`${UNITS_KEY}.${model}`) ?? "";
export const chooseUnits = (model, units) => localStorage.setItem(`${UNITS_KEY}.${model}`, units);

/** Values as shares of width and height. `sizes`: {original, processed}, [width, height] each. */
export function shares(region, open, units, sizes) {
  const scale = open && units ? units : region.scale;
  const [width, height] = sizes[scale] ?? [Number(scale), Number(scale)];
  return region.values.map((value, index) => Math.min(1, value / (index % 2 ? height : width)));
}

/** A box as x1, y1, x2, y2 in shares of the picture, in order. */
export function sharesOf(grounding, index, units, sizes) {
  const region = grounding.regions[index];
  const [x1, y1, x2, y2] = shares(region, Boolean(grounding.scale) && region.scale === grounding.scale, units, sizes);
  return [Math.min(x1, x2), Math.min(y1, y2), Math.max(x1, x2), Math.max(y1, y2)];
}

/** Draw into an <svg> of width × height pixels. `grounding`: {regions, scale, why}, read in the answer by the server. */
export function drawMarks(target, width, height, grounding, units, sizes) {
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren();
  grounding.regions.forEach((region, index) => {
    const colour = COLOURS[index % COLOURS.length];
    const at = shares(region, Boolean(grounding.scale) && region.scale === grounding.scale, units, sizes).map((v, i) => v * (i % 2 ? height : width));
    if (region.kind === "box") {
      const [x1, y1, x2, y2] = at;
      target.append(svg("rect", { x: x1, y: y1, width: Math.max(1, x2 - x1), height: Math.max(1, y2 - y1), stroke: colour, rx: 2, "data-region": index }));
      label(target, x1, y1 >= 18 ? y1 - 18 : Math.min(y2, height - 18), region.label, colour, width);
    } else {
      target.append(svg("circle", { cx: at[0], cy: at[1], r: 6, stroke: "#fff" }), svg("circle", { cx: at[0], cy: at[1], r: 4, stroke: colour }));
      label(target, at[0] + 9, Math.max(0, at[1] - 9), region.label, colour, width);
    }
  });
}

function label(target, x, top, text, colour, width) {
  if (!text) return;
  const short = text.length > WIDEST_LABEL ? `${text.slice(0, WIDEST_LABEL - 1)}…` : text;
  const words = svg("text");
  words.textContent = short;
  target.append(words); // to be measured
  const long = words.getComputedTextLength() + 10;
  const left = Math.max(0, Math.min(x - 1, width - long));
  const pill = svg("rect", { x: left, y: top, width: long, height: 18, rx: 3 });
  pill.style.fill = colour;
  words.setAttribute("x", left + 5);
  words.setAttribute("y", top + 13);
  target.insertBefore(pill, words);
}

/** What the regions are, in the picture's own pixels, for reading and copying. */
export function inPixels(grounding, units, sizes) {
  const [width, height] = sizes.original;
  return grounding.regions.map((region) => {
    const at = shares(region, Boolean(grounding.scale) && region.scale === grounding.scale, units, sizes).map((v, i) => Math.round(v * (i % 2 ? height : width)));
    return { label: region.label, [region.kind === "box" ? "bbox_2d" : "point_2d"]: at };
  });
}

const MEMBER = /["'](?:bbox_2d|bbox|box_2d|box|point_2d|point)["']\s*:\s*\[/;
const NUMBERS = /^\[[\s\d.,[\]-]*\]$/; // of one box, or of several
const TAGS = /(?:<(?:ref|\|object_ref_start\|)>[^<]*<[^<>]*>\s*)?<(?:box|\|box_start\|)>[^<]*<(?:\/box|\|box_end\|)>|(?:<loc\d{4}>){4}[^<;\n]*|<point\s[^<>]*>[^<]*<\/point>|<\|ref\|>[^<]*<\|\/ref\|>\s*<\|det\|>[^<]*<\|\/det\|>/g;
const LOCATED = /(?:<loc_\d{1,3}>){4,400}/; // behind a name of at most NAME_MAX characters
const NAME_MAX = 80;
const FENCE = /^[ \t]*(?:```|~~~)/;
const READ_MAX = 1 << 20; // characters that are looked at for the ends of what begins

/** An answer without the places that are drawn over its picture: {words, notation}. Out go blocks of code with them and JSON that ends
 * a line; what is named in the midst of a sentence stays. */
export function withoutPlaces(text) {
  const names = text.split(LOCATED);
  const located = names.length > 1 && !names.at(-1).trim() && names.every((name) => name.length <= NAME_MAX && !/[<>]/.test(name));
  if (located || !text.replace(TAGS, "").replace(/[\s;,.]/g, "")) return { words: "", notation: text };
  const [words, notation] = [[], []];
  let [at, read] = [0, 0];
  while (at < text.length) {
    const end = lineEnd(text, at);
    const place = FENCE.test(text.slice(at, end)) ? fencedAt(text, at, end) : read < READ_MAX ? jsonIn(text, at, end) : {};
    read += place.read ?? 0;
    const next = place.until ?? end;
    words.push(text.slice(at, place.notation ? place.begin : next));
    if (place.notation) notation.push(place.notation);
    at = next;
  }
  return { words: words.join("").trim(), notation: notation.join("\n") };
}

/** {begin, until, notation} of the block of code that begins at `at`; `notation` null where it says no places. */
function fencedAt(text, at, end) {
  let until = end;
  for (let last = false; until < text.length && !last;) {
    const next = lineEnd(text, until);
    last = FENCE.test(text.slice(until, next));
    until = next;
  }
  const body = text.slice(end, until).trimEnd();
  const code = (/(?:```|~~~)$/.test(body) ? body.slice(0, -3) : body).trim();
  return { begin: at, until, notation: MEMBER.test(code) || NUMBERS.test(code) ? code : null };
}

/** The same of JSON that begins in this line and ends with a line; only what was `read` where it says no places. */
function jsonIn(text, at, end) {
  const begin = at + text.slice(at, end).search(/[[{]/);
  if (begin < at) return {};
  const until = jsonEnd(text, begin);
  const code = text.slice(begin, until);
  const after = lineEnd(text, until);
  const isPlace = !text.slice(until, after).trim() && (MEMBER.test(code) || (!text.slice(at, begin).trim() && NUMBERS.test(code)));
  return isPlace ? { begin, until: after, notation: code.trim(), read: code.length } : { read: code.length };
}

/** Behind the line break. */
function lineEnd(text, at) {
  const end = text.indexOf("\n", at);
  return end < 0 ? text.length : end + 1;
}

/** Behind the bracket that closes the one at `at`; the end of the text where an answer was cut before that. */
function jsonEnd(text, at) {
  let [depth, quoted] = [0, false];
  for (let place = at; place < text.length; place += 1) {
    const sign = text[place];
    if (quoted) {
      if (sign === "\\") place += 1;
      else if (sign === '"') quoted = false;
    } else if (sign === '"') quoted = true;
    else if (sign === "[" || sign === "{") depth += 1;
    else if (sign === "]" || sign === "}") depth -= 1;
    if (!depth) return place + 1;
  }
  return text.length;
}

/** The picture with its marks as a button, which opens the viewer. */
export function figure(image, grounding, units, sizes, open) {
  const marks = svg("svg", { class: "marks", "aria-hidden": "true" });
  const img = el("img", { alt: `${image.name || "Picture"} with ${grounding.regions.length} marked` });
  const made = el("button", { class: "figure", type: "button", on: { click: open } }, img, marks);
  const redraw = () => { if (img.clientWidth) drawMarks(marks, img.clientWidth, img.clientHeight, grounding, units(), sizes); };
  new ResizeObserver(redraw).observe(img);
  show(img, imagePath(image.sha256));
  return made;
}
