// The wave form of audio: drawn from its samples, which the browser decodes, and clicked or moved along to play from elsewhere.

import { el, svg } from "../shared/dom.js";
import { bytesOf, imagePath } from "../shared/server.js";
import { clock } from "./video.js";

const RATE = 8000; // samples a second: loudness is drawn, not heard
const LONGEST_S = 1800; // that a browser decodes at once: half an hour of two channels takes 115 MB
const BARS = 120;
const LEAST = 0.04; // of the height, where it is silent
const STEP_S = 5; // of an arrow key
const KEPT = 32; // files
const EVENTS = ["timeupdate", "seeked", "loadedmetadata"];

const known = new Map(); // heights of bars by digest
let count = 0;

/** A slider below whose bars `player` stands; empty and hidden until the audio is decoded, and where it cannot be. */
export function waveForm(player, image) {
  const length = image.seconds ?? 0;
  count += 1;
  const [id, played] = [`wave-${count}`, svg("rect", { width: 0, height: 1 })];
  const slider = el("div", { class: "wave", hidden: true, tabIndex: 0, role: "slider", "aria-label": "Position", "aria-valuemin": "0", "aria-valuemax": String(Math.round(length)) });
  const show = () => {
    const at = Math.min(player.currentTime, length);
    played.setAttribute("width", String(length ? at / length : 0));
    slider.setAttribute("aria-valuenow", String(Math.round(at)));
    slider.setAttribute("aria-valuetext", `${clock(Math.round(at))} of ${clock(Math.round(length))}`);
  };
  const go = (seconds) => {
    player.currentTime = Math.max(0, Math.min(length, seconds));
    show();
  };
  slider.addEventListener("pointerdown", (event) => {
    const drag = (move) => go(((move.clientX - slider.getBoundingClientRect().left) / slider.clientWidth) * length);
    slider.setPointerCapture(event.pointerId);
    slider.addEventListener("pointermove", drag);
    for (const end of ["pointerup", "pointercancel"]) slider.addEventListener(end, () => slider.removeEventListener("pointermove", drag), { once: true });
    drag(event);
  });
  slider.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: player.currentTime - STEP_S, ArrowRight: player.currentTime + STEP_S, ArrowDown: player.currentTime - STEP_S,
      ArrowUp: player.currentTime + STEP_S, Home: 0, End: length }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
  });
  let was = false; // on the page
  const follow = () => {
    if (slider.isConnected) show();
    else if (was) for (const event of EVENTS) player.removeEventListener(event, follow); // the player of the dialog is for all files
    was ||= slider.isConnected;
  };
  for (const event of EVENTS) player.addEventListener(event, follow);
  if (length && length <= LONGEST_S) {
    bars(image.sha256).then((heights) => {
      const path = heights.map((height, index) => `M${index + 0.2} ${(1 - height) / 2}h.6v${height}h-.6z`).join("");
      slider.append(svg("svg", { viewBox: `0 0 ${BARS} 1`, preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("clipPath", { id, clipPathUnits: "objectBoundingBox" }, played),
        svg("path", { d: path }), svg("path", { class: "wave-played", d: path, "clip-path": `url(#${id})` })));
      slider.hidden = false;
      show();
    }, () => {}); // the player says what it cannot play
  }
  show();
  return slider;
}

/** Loudness of equal parts, the loudest 1. */
async function bars(digest) {
  if (!known.has(digest)) {
    const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await bytesOf(imagePath(digest))); // at that rate
    const samples = decoded.getChannelData(0);
    const loud = Array.from({ length: BARS }, (_, bar) => {
      const [start, stop] = [0, 1].map((end) => Math.floor(((bar + end) / BARS) * samples.length));
      let sum = 0;
      for (let at = start; at < stop; at += 1) sum += samples[at] ** 2;
      return Math.sqrt(sum / Math.max(1, stop - start));
    });
    const loudest = Math.max(...loud, 1e-4); // silence stays flat
    known.set(digest, loud.map((value) => Math.max(LEAST, value / loudest)));
    if (known.size > KEPT) known.delete(known.keys().next().value);
  }
  return known.get(digest);
}
