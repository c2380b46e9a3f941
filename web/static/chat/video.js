// Videos: played in a dialog, cut to a part before they are sent, and found at the times that an answer names.

import { $, announce, el, icon } from "../shared/dom.js";
import { pixels } from "../shared/format.js";
import { imagePath, pictureUrl, show, smallPath } from "../shared/server.js";
import { waveForm } from "./wave.js";

// 1:05, 1:02:05, 12 s, 3.5 seconds
const TIMES = /\b(?:(\d{1,2}):)?(\d{1,2}):(\d{2})\b|\b(\d{1,5}(?:\.\d{1,3})?) ?(?:seconds|second|secs|sec|s)\b/g;
const LINKS_MAX = 200; // of one answer
const LONGEST = 160; // CSS pixels of a video in the thread

let shown = null; // {image, trimmed}

export const isVideo = (image) => Boolean(image?.kind?.startsWith("video/"));
export const isStill = (image) => !/^(video|audio)\//.test(image?.kind ?? "");

/** 75.5 as 1:15.5, whole seconds without a fraction. */
export function clock(seconds) {
  const whole = Math.floor(seconds);
  const rest = Math.round((seconds - whole) * 10);
  if (rest === 10) return clock(whole + 1);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const words = (parts[0] ? parts : parts.slice(1)).map((part, index) => (index ? String(part).padStart(2, "0") : String(part)));
  return words.join(":") + (rest ? `.${rest}` : "");
}

/** Which part of it is shown, or how long it is. */
export function partOf(image) {
  if (typeof image.start !== "number" && typeof image.end !== "number") return clock(image.seconds ?? 0);
  return `${clock(image.start ?? 0)}–${clock(image.end ?? image.seconds ?? 0)}`;
}

/** `at`: seconds to begin at. `trimmed(start, end)`: called with the part to be shown, null for what is left open; without it the
 * video cannot be cut any more. */
export function openVideo(image, { at = image.start ?? 0, trimmed = null, play = false } = {}) {
  shown = { image, trimmed };
  $("video-title").textContent = image.name || "Video";
  $("video-info").textContent = [...(image.width ? [pixels([image.width, image.height])] : []), clock(image.seconds ?? 0)].join(", ");
  $("video-trim").hidden = !trimmed;
  for (const [id, value] of [["video-from", image.start], ["video-to", image.end]]) {
    $(id).value = value ?? "";
    $(id).max = image.seconds ?? "";
  }
  $("video-mute").hidden = true;
  const player = $("video-player");
  player.hidden = false;
  $("video-wave").replaceChildren(...(isVideo(image) ? [] : [waveForm(player, image)]));
  if (!isVideo(image)) player.muted = false;
  if (!$("video").open) $("video").showModal();
  jump(player, image, at, play);
}

async function jump(player, image, at, play) {
  const path = imagePath(image.sha256);
  if (player.dataset.of !== image.sha256) {
    player.dataset.of = image.sha256;
    try {
      player.src = await pictureUrl(path);
    } catch {
      unplayable();
      return;
    }
  }
  const go = () => {
    player.currentTime = at;
    if (play) player.play().catch(() => {}); // some browsers want to be asked by hand
  };
  if (player.readyState) go();
  else player.addEventListener("loadedmetadata", go, { once: true });
}

function unplayable() {
  $("video-player").hidden = true;
  $("video-mute").hidden = false;
}

export function startVideos() {
  const player = $("video-player");
  player.addEventListener("error", unplayable);
  $("video-close").addEventListener("click", () => $("video").close());
  $("video").addEventListener("close", () => player.pause());
  const here = (id) => { $(id).value = Math.round(player.currentTime * 10) / 10; };
  $("video-from-here").addEventListener("click", () => here("video-from"));
  $("video-to-here").addEventListener("click", () => here("video-to"));
  $("video-whole").addEventListener("click", () => cut(null, null));
  $("video-trim").addEventListener("submit", (event) => {
    event.preventDefault();
    const [start, end] = ["video-from", "video-to"].map((id) => ($(id).value === "" ? null : Number($(id).value)));
    const wrong = start !== null && end !== null && end < start;
    $("video-to").setCustomValidity(wrong ? "This part ends before it starts." : "");
    if (!$("video-trim").reportValidity()) return;
    cut(start, end);
  });
  $("video-to").addEventListener("input", () => $("video-to").setCustomValidity(""));
}

function cut(start, end) {
  shown.trimmed(start, end);
  announce(start === null && end === null ? "The whole video is shown" : "A part of the video is shown");
  $("video").close();
}

/** A video of a message as a button. */
export function videoButton(image) {
  const scale = Math.min(LONGEST / Math.max(image.width, image.height, 1), 1);
  const size = { width: Math.max(48, Math.round(image.width * scale)), height: Math.max(48, Math.round(image.height * scale)) };
  return el("button", { class: "picture video", type: "button", "aria-label": `Play ${image.name || "video"}, ${partOf(image)}`, on: { click: () => openVideo(image) } },
    show(el("img", { alt: "", ...size }), smallPath(image.sha256)), el("span", { class: "video-part" }, icon("right"), partOf(image)));
}

/** Times in a text that is whole become buttons that lead there in `image`. */
export function linkTimes(element, image) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("a, button, code, pre, .katex")) texts.push(walker.currentNode);
  let left = LINKS_MAX;
  for (const text of texts) {
    const pieces = [];
    let end = 0;
    for (const match of text.data.matchAll(TIMES)) {
      const at = match[4] === undefined ? Number(match[1] ?? 0) * 3600 + Number(match[2]) * 60 + Number(match[3]) : Number(match[4]);
      if (at > (image.seconds ?? 0) + 1 || left === 0) continue;
      left -= 1;
      pieces.push(text.data.slice(end, match.index), el("button", { class: "link time", type: "button", title: image.width ? "Show this place in the video" : "Play from here",
        on: { click: () => openVideo(image, { at, play: true }) } }, match[0]));
      end = match.index + match[0].length;
    }
    if (pieces.length) text.replaceWith(...pieces, text.data.slice(end));
  }
}
