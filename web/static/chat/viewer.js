// A picture large: zoom, the marks of an answer, and a region to ask about, chosen by mouse, finger or keys.

import { $, announce, el, toast } from "../shared/dom.js";
import { pixels } from "../shared/format.js";
import { imagePath, pictureUrl } from "../shared/server.js";
import { chosenUnits, chooseUnits, drawMarks, sharesOf } from "./regions.js";

const STEP = 0.02; // of the picture, for the arrow keys
const SMALLEST = 0.01;
const FRAME = 0.006; // width of a drawn frame's line, of the longer side
const CROP_PIXELS = 4096; // on the longer side

let items = [];
let place = 0;
let zoom = 1;
let box = null; // x1, y1, x2, y2 as shares of the picture
let ask = () => {};
let model = "";
let redrawn = () => {};

/** `list`: {path, title, info, width, height, askable, grounding, sizes, number, replace}; `replace(blob)` gives the picture that is in
 * its place then, for one that is not sent yet. `settled` is called when other units were chosen. */
export function openViewer(list, index, settled = () => {}) {
  [items, place, redrawn] = [list, index, settled];
  $("viewer").showModal();
  display();
  $("stage").focus();
}

/** Of another model boxes may be in other units. */
export function setModel(name) {
  model = name;
}

export function startViewer(modelName, onAsk) {
  [model, ask] = [modelName, onAsk];
  $("viewer-close").addEventListener("click", () => $("viewer").close());
  $("viewer-prev").addEventListener("click", () => move(-1));
  $("viewer-next").addEventListener("click", () => move(1));
  $("viewer-in").addEventListener("click", () => zoomTo(zoom * 1.5));
  $("viewer-out").addEventListener("click", () => zoomTo(zoom / 1.5));
  $("viewer-select").addEventListener("click", () => setSelecting(!selecting()));
  $("viewer-ask").addEventListener("click", askAboutRegion);
  $("viewer-turn").addEventListener("click", () => replace(turned()));
  $("viewer-cut").addEventListener("click", () => replace(regionOf($("viewer-image"), box)));
  $("viewer-frame").addEventListener("click", () => replace(framed($("viewer-image"), box)));
  $("viewer-marks").addEventListener("click", (event) => {
    const mark = event.target.closest("[data-region]");
    if (mark) chooseRegion(Number(mark.dataset.region));
  });
  $("viewer-units").addEventListener("change", () => {
    chooseUnits(model, $("viewer-units").value);
    layOut();
    redrawn();
  });
  $("stage").addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && zoom === 1 && event.deltaY > 0) return;
    event.preventDefault();
    zoomTo(zoom * (event.deltaY < 0 ? 1.2 : 1 / 1.2), event);
  }, { passive: false });
  $("stage").addEventListener("keydown", onKey);
  $("canvas").addEventListener("pointerdown", startDrag);
  new ResizeObserver(() => { if ($("viewer").open) layOut(); }).observe($("stage"));
}

const selecting = () => $("viewer-select").getAttribute("aria-pressed") === "true";

function move(by) {
  const next = place + by;
  if (next < 0 || next >= items.length) return;
  place = next;
  display();
}

function display() {
  const item = items[place];
  zoom = 1;
  $("viewer-title").replaceChildren(el("bdi", {}, item.title), items.length > 1 ? ` (${place + 1} of ${items.length})` : "");
  $("viewer-info").textContent = item.info;
  $("viewer-image").removeAttribute("src");
  $("viewer-image").alt = item.title;
  pictureUrl(item.path).then((url) => { if (items[place] === item) $("viewer-image").src = url; }, (error) => toast(error.message));
  $("viewer-prev").hidden = $("viewer-next").hidden = items.length < 2;
  $("viewer-prev").disabled = place === 0;
  $("viewer-next").disabled = place === items.length - 1;
  $("viewer-select").hidden = !item.askable;
  $("viewer-turn").hidden = !item.replace;
  $("viewer-scale").hidden = !item.grounding?.scale;
  if (item.grounding?.scale) {
    $("viewer-units").value = chosenUnits(model) || item.grounding.scale;
    $("viewer-info").textContent += ` · read so because ${item.grounding.why}`;
  }
  setSelecting(false);
  layOut();
}

/** Fit the picture into the stage, times the zoom. */
function layOut() {
  const item = items[place];
  const stage = $("stage");
  const fit = Math.min((stage.clientWidth - 24) / item.width, (stage.clientHeight - 24) / item.height);
  const scale = Math.min(fit, Math.max(1, Math.min(fit, 8))) * zoom;
  const [width, height] = [Math.max(1, item.width * scale), Math.max(1, item.height * scale)];
  $("canvas").style.width = `${width}px`;
  $("canvas").style.height = `${height}px`;
  $("canvas").classList.toggle("sharp", scale >= 3);
  if (item.grounding) drawMarks($("viewer-marks"), width, height, item.grounding, chosenUnits(model), item.sizes);
  else $("viewer-marks").replaceChildren();
  drawBox();
}

function zoomTo(wanted, pointer) {
  const stage = $("stage");
  const before = zoom;
  zoom = Math.min(16, Math.max(1, wanted));
  const edges = stage.getBoundingClientRect();
  const [x, y] = pointer ? [pointer.clientX - edges.left, pointer.clientY - edges.top] : [edges.width / 2, edges.height / 2];
  const [left, top] = [stage.scrollLeft + x, stage.scrollTop + y];
  layOut();
  stage.scrollLeft = left * (zoom / before) - x;
  stage.scrollTop = top * (zoom / before) - y;
}

function setSelecting(on) {
  $("viewer-select").setAttribute("aria-pressed", String(on));
  $("canvas").classList.toggle("selecting", on);
  box = on ? [0.25, 0.25, 0.75, 0.75] : null;
  if (on) {
    announce("Drag over the picture, or move the region with the arrow keys and change its size with shift and the arrow keys.");
    $("stage").focus();
  }
  drawBox();
}

function drawBox() {
  $("selection").hidden = !box;
  $("viewer-ask").hidden = !box;
  $("viewer-cut").hidden = $("viewer-frame").hidden = !box || !items[place].replace;
  if (!box) return;
  const [x1, y1, x2, y2] = box;
  Object.assign($("selection").style, { left: `${x1 * 100}%`, top: `${y1 * 100}%`, width: `${(x2 - x1) * 100}%`, height: `${(y2 - y1) * 100}%` });
}

/** With a mouse any drag chooses a region; a finger scrolls unless the tool is on. */
function startDrag(down) {
  if (!items[place].askable || down.button !== 0 || (down.pointerType !== "mouse" && !selecting())) return;
  if (!selecting() && down.target.closest("[data-region]")) return; // a box of the answer, which is clicked
  const edges = $("canvas").getBoundingClientRect();
  const at = (e) => [Math.min(1, Math.max(0, (e.clientX - edges.left) / edges.width)), Math.min(1, Math.max(0, (e.clientY - edges.top) / edges.height))];
  const [x, y] = at(down);
  down.preventDefault();
  $("canvas").setPointerCapture(down.pointerId);
  const drag = (e) => {
    const [x2, y2] = at(e);
    const next = [Math.min(x, x2), Math.min(y, y2), Math.max(x, x2), Math.max(y, y2)];
    if (next[2] - next[0] < SMALLEST || next[3] - next[1] < SMALLEST) return;
    box = next;
    drawBox();
  };
  const stop = () => {
    $("canvas").removeEventListener("pointermove", drag);
    if (box) {
      $("viewer-select").setAttribute("aria-pressed", "true");
      $("canvas").classList.add("selecting");
      $("viewer-ask").focus();
    }
  };
  $("canvas").addEventListener("pointermove", drag);
  $("canvas").addEventListener("pointerup", stop, { once: true });
  $("canvas").addEventListener("pointercancel", stop, { once: true });
}

function onKey(event) {
  const step = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
  if (box && step) {
    event.preventDefault();
    const [dx, dy] = step;
    const next = event.shiftKey ? [box[0], box[1], box[2] + dx, box[3] + dy] : [box[0] + dx, box[1] + dy, box[2] + dx, box[3] + dy];
    if (Math.min(...next) >= -1e-9 && Math.max(...next) <= 1 + 1e-9 && next[2] - next[0] >= STEP && next[3] - next[1] >= STEP) box = next;
    drawBox();
  } else if (box && event.key === "Enter") {
    event.preventDefault();
    askAboutRegion();
  } else if (!box && event.key === "ArrowLeft" && zoom === 1) move(-1);
  else if (!box && event.key === "ArrowRight" && zoom === 1) move(1);
  else if (event.key === "+" || event.key === "=") zoomTo(zoom * 1.5);
  else if (event.key === "-") zoomTo(zoom / 1.5);
}

/** A box of the answer becomes the region to ask about. */
function chooseRegion(index) {
  const item = items[place];
  const region = item.grounding.regions[index];
  if (region?.kind !== "box") return;
  setSelecting(true);
  box = sharesOf(item.grounding, index, chosenUnits(model), item.sizes);
  drawBox();
  $("viewer-ask").focus();
}

async function askAboutRegion() {
  const item = items[place];
  if (!box || !$("viewer-image").naturalWidth) return;
  const blob = await regionOf($("viewer-image"), box);
  $("viewer").close();
  ask(item, blob);
}

/** What is attached is another picture from now on. */
async function replace(made) {
  const item = items[place];
  const blob = await made;
  const image = await item.replace(blob);
  if (!image || items[place] !== item) return;
  Object.assign(item, { path: imagePath(image.sha256), info: pixels([image.width, image.height]), width: image.width, height: image.height, image });
  display();
  announce("Changed");
}

function turned() {
  const image = $("viewer-image");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalHeight, image.naturalWidth];
  const context = canvas.getContext("2d");
  context.translate(canvas.width, 0);
  context.rotate(Math.PI / 2);
  context.drawImage(image, 0, 0);
  return fileOf(canvas);
}

/** The whole picture with a red frame around `region`, for the model to see: "what is in the red frame?". */
function framed(image, [x1, y1, x2, y2]) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const line = Math.max(2, FRAME * Math.max(canvas.width, canvas.height));
  for (const [colour, width] of [["#fff", 2 * line], ["#e00000", line]]) { // seen on a ground of any colour
    [context.strokeStyle, context.lineWidth] = [colour, width];
    context.strokeRect(x1 * canvas.width, y1 * canvas.height, (x2 - x1) * canvas.width, (y2 - y1) * canvas.height);
  }
  return fileOf(canvas);
}

const fileOf = (canvas) => new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });

/** The part of a picture that `region`, shares of it, holds. */
export function regionOf(image, region) {
  const [x1, y1, x2, y2] = region;
  const [width, height] = [(x2 - x1) * image.naturalWidth, (y2 - y1) * image.naturalHeight];
  const scale = Math.min(1, CROP_PIXELS / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.getContext("2d").drawImage(image, x1 * image.naturalWidth, y1 * image.naturalHeight, width, height, 0, 0, canvas.width, canvas.height);
  return fileOf(canvas);
}

/** One box of an answer, without opening the picture. */
export async function askAboutBox(item, index) {
  const image = new Image();
  image.src = await pictureUrl(item.path);
  await image.decode();
  const region = sharesOf(item.grounding, index, chosenUnits(model), item.sizes);
  ask({ ...item, title: item.grounding.regions[index].label || item.title }, await regionOf(image, region));
}
