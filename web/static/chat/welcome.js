// What an empty chat shows: sample pictures with questions to click, and what the model knows.

import { commandBox } from "../shared/command.js";
import { $, el, icon } from "../shared/dom.js";
import { at } from "../shared/server.js";
import { openViewer } from "./viewer.js";

const path = (sample) => `/static/samples/${sample.file}`;

/** `about`: of the model. `ask(fetch, name, question)` is called with what was clicked; `fetch()` gives the picture's file. */
export function startWelcome(about, ask) {
  $("welcome-title").textContent = about.vision ? "Ask about a picture" : "Ask a question";
  $("welcome-how").hidden = !about.vision;
  $("welcome-text-only").hidden = about.vision;
  const hasSamples = about.samples.length > 0;
  for (const id of ["samples", "welcome-or"]) $(id).hidden = !hasSamples;
  $("samples").replaceChildren(...about.samples.map((sample) => card(sample, ask)));
  $("welcome-model").replaceChildren(...(about.demo ? demoNote() : []));
}

function card(sample, ask) {
  const large = () => openViewer([{ path: path(sample), title: sample.shows, info: `${sample.width} × ${sample.height} px`,
    width: sample.width, height: sample.height, askable: false }], 0);
  const picture = el("button", { class: "picture", type: "button", "aria-label": `Show large: ${sample.shows}`, on: { click: large } },
    el("img", { src: at(path(sample)), alt: sample.shows, width: sample.width, height: sample.height }));
  const file = async () => (await fetch(at(path(sample)))).blob();
  const questions = sample.asks.map((question) => el("button", { class: "ask", type: "button",
    on: { click: (event) => once(event.currentTarget, () => ask(file, sample.file, question)) } }, el("span", {}, question), icon("right")));
  return el("li", { class: "sample" }, picture, el("div", { class: "asks" }, questions));
}

/** A second click while the first is on its way sends nothing. */
async function once(button, run) {
  const all = [...$("samples").querySelectorAll(".ask")];
  for (const one of all) one.disabled = true;
  try {
    await run();
  } finally {
    for (const one of all) one.disabled = false;
  }
}

function demoNote() {
  return [el("p", {}, "This is the small demo model. It knows drawn shapes, short words and numbers on a plain ground, in pictures and little videos, and nothing of photos."),
    el("p", {}, "For a real model: ", commandBox("mtmd serve -m org/name"))];
}
