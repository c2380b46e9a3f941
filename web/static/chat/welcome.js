// What an empty chat shows: sample pictures and a video with questions to click, and what the model knows.

import { commandBox } from "../shared/command.js";
import { $, el, icon } from "../shared/dom.js";
import { at } from "../shared/server.js";
import { openViewer } from "./viewer.js";

const demo = { model: null, samples: new Set() };

const path = (file) => `/static/samples/${file}`;

/** `about`: of the model. `ask(fetch, name, question)` is called with what was clicked; `fetch()` gives the picture's file. */
export function startWelcome(about, ask) {
  if (about.demo) Object.assign(demo, { model: about.model, samples: new Set(about.samples.map(({ sha256 }) => sha256)) });
  $("welcome-title").textContent = about.vision ? "Ask about a picture" : "Ask a question";
  $("welcome-how").hidden = !about.vision;
  $("welcome-text-only").hidden = about.vision;
  const hasSamples = about.samples.length > 0;
  for (const id of ["samples", "welcome-or"]) $(id).hidden = !hasSamples;
  $("samples").replaceChildren(...about.samples.map((sample) => card(sample, ask)));
  $("welcome-model").replaceChildren(...(about.demo ? demoNote() : []));
}

function card(sample, ask) {
  const picture = sample.poster ? moving(sample) : still(sample);
  const file = async () => (await fetch(at(path(sample.file)))).blob();
  const questions = sample.asks.map((question) => el("button", { class: "ask", type: "button",
    on: { click: (event) => once(event.currentTarget, () => ask(file, sample.file, question)) } }, el("span", {}, question), icon("right")));
  return el("li", { class: "sample" }, picture, el("div", { class: "asks" }, questions));
}

function still(sample) {
  const large = () => openViewer([{ path: path(sample.file), title: sample.shows, info: `${sample.width} × ${sample.height} px`,
    width: sample.width, height: sample.height, askable: false }], 0);
  return el("button", { class: "picture", type: "button", "aria-label": `Show large: ${sample.shows}`, on: { click: large } },
    el("img", { src: at(path(sample.file)), alt: sample.shows, width: sample.width, height: sample.height }));
}

/** Plays in its place, until it is clicked again. */
function moving(sample) {
  const video = el("video", { src: at(path(sample.file)), poster: at(path(sample.poster)), width: sample.width, height: sample.height, preload: "none" });
  [video.muted, video.loop, video.playsInline] = [true, true, true];
  const badge = el("span", { class: "video-part" }, icon("right"), "video");
  const toggle = () => (video.paused ? video.play().catch(() => {}) : video.pause()); // a browser without this codec shows the poster
  const button = el("button", { class: "picture video", type: "button", "aria-label": `Play video: ${sample.shows}`, "aria-pressed": "false", on: { click: toggle } }, video, badge);
  for (const event of ["play", "pause"]) video.addEventListener(event, () => { badge.hidden = !video.paused; button.setAttribute("aria-pressed", String(!video.paused)); });
  return button;
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

/** Whether an answer of the demo model is about a picture of somebody's own, of which it may know nothing. `pictures`: those before it. */
export const isBeyondDemo = (receipt, pictures) => receipt?.model === demo.model && pictures.some(({ sha256 }) => !demo.samples.has(sha256));

function demoNote() {
  return [el("p", {}, "This is the small demo model. It knows drawn shapes, short words and numbers on a plain background, in pictures and short videos, but no photos."),
    el("p", {}, "For a real model: ", commandBox("mtmd serve -m HuggingFaceTB/SmolVLM-500M-Instruct"))];
}
