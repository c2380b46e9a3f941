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
