// The receipt below an answer: what the model saw, where it ran, how long each part took.

import { el, svg, toast } from "../shared/dom.js";
import { STAGES, isolated, milliseconds, pixels, plural } from "../shared/format.js";
import { get, show } from "../shared/server.js";
import { isAudio } from "./audio.js";
import { clock, isStill, isVideo, openVideo } from "./video.js";
import { openViewer } from "./viewer.js";

const SYSTEM_SHOWN = 40; // characters
const ENDS = { stop: "finished", length: "reached the length limit", cancelled: "stopped" };

/** `pictures()`: those of the branch before the answer, in the order of the receipt's. */
export function receiptOf(receipt, options, pictures) {
  const made = el("details", { class: "receipt" }, el("summary", {}, ...summary(receipt)));
  made.addEventListener("toggle", () => {
    if (made.open && made.children.length === 1) made.append(body(receipt, options ?? {}, pictures()));
    if (made.open) requestAnimationFrame(() => made.scrollIntoView({ block: "nearest" })); // not behind the message box
  });
  return made;
}

function summary(receipt) {
  const total = STAGES.reduce((sum, [name]) => sum + (receipt[name] ?? 0), 0);
  const parts = [];
  const videos = receipt.videos ?? []; // an answer of an earlier version has none
  const looked = [[receipt.images, "picture"], [videos, "video"], [receipt.audio ?? [], "audio file"]].filter(([list]) => list.length).map(([list, word]) => plural(list.length, word));
  if (looked.length) parts.push(`${looked.join(" and ")}, ${plural(receipt.image_tokens + (receipt.audio_tokens ?? 0), "token")}`);
  parts.push(`${plural(receipt.output_tokens, "token")} in ${milliseconds(total)}`, receipt.device);
  if (receipt.finish === "length") parts.push(ENDS.length);
  const words = [el("span", {}, parts.join(" · "))];
  if (receipt.warnings.length) words.push(el("span", { class: "warning" }, plural(receipt.warnings.length, "warning")));
  return words;
}

function body(receipt, options, pictures) {
  const made = el("div", { class: "receipt-body" });
  const [stills, videos] = [pictures.filter(isStill), pictures.filter(isVideo)];
  receipt.images.forEach((image, index) => made.append(seen(image, stills[index])));
  (receipt.videos ?? []).forEach((video, index) => made.append(seenVideo(video, videos[index])));
  const files = pictures.filter(isAudio);
  (receipt.audio ?? []).forEach((audio, index) => made.append(heard(audio, files[index])));
  made.append(times(receipt), facts([
    ["Prompt", `${plural(receipt.prompt_tokens, "token")}${receipt.reused_tokens ? `, ${receipt.reused_tokens.toLocaleString("en")} from the cache` : ""}`],
    ["Answer", `${plural(receipt.output_tokens, "token")}, ${ENDS[receipt.finish] ?? receipt.finish}`],
    ["Thought", receipt.thinking_tokens ? plural(receipt.thinking_tokens, "token") : null],
    ["Speed", receipt.decode_ms > 0 && receipt.output_tokens > 1 ? `${(((receipt.output_tokens - 1) / receipt.decode_ms) * 1000).toFixed(1)} tokens/s` : null],
    ["Compiled", receipt.kernels_compiled ? `${plural(receipt.kernels_compiled, "kernel")} meanwhile, in ${Math.round(receipt.compile_ms)} ms, kept for later answers` : null],
    ["Speculation", receipt.proposed_tokens ? `${plural(receipt.proposed_tokens, "token")} proposed, ${receipt.accepted_tokens.toLocaleString("en")} accepted` : null],
    ["Model", receipt.model],
    ["Device", `${receipt.device}${receipt.threads ? `, ${plural(receipt.threads, "thread")}` : ""}, ${receipt.dtype}`],
    ["Adapters", Object.entries(receipt.adapters ?? {}).map(([name, scale]) => `${name}, scale ${scale}`).join("; ")],
    ["Keys and values", receipt.kv_type && receipt.kv_type !== receipt.dtype ? `${receipt.kv_type}, ${(receipt.kv_bytes / 2 ** 20).toFixed(1)} MiB` : null],
    ["Activations", receipt.activations && receipt.activations !== "auto" ? receipt.activations : null],
    ["Layout", receipt.layout || null],
    ["Pictures", receipt.preprocessed ? `prepared ${receipt.preprocessed}` : null],
    ["Attention", Object.entries(receipt.attention).map(([part, kernel]) => `${part}: ${kernel}`).join("; ")],
    ["Sampling", sampling(receipt, options)],
    ["Not applied", (receipt.sampling_unused ?? []).join(", ")],
    ["Files", (receipt.model_notes ?? []).join("; ")],
    ...receipt.warnings.map((warning) => ["Warning", warning, "warning"]),
  ]));
  return made;
}

function sampling(receipt, options) {
  const used = receipt.sampling ?? {}; // an answer of an earlier version has none
  if (used.temperature) {
    const words = Object.entries(used).map(([name, { value, source }]) => `${name.replaceAll("_", " ")} ${Number(value.toPrecision(4))}${source === "request" || source === "default" ? "" : ` (${source})`}`);
    const drawn = used.temperature.value ? words : ["the most probable token each time", ...words.slice(1)];
    return [...drawn, used.temperature.value && receipt.seed !== null ? `seed ${receipt.seed}` : null].filter(Boolean).join(", ");
  }
  if (!options.temperature) return "the most probable token each time";
  const rest = ["top_p", "top_k", "min_p"].filter((name) => options[name]).map((name) => `${name.replace("_", " ")} ${options[name]}`);
  return [`temperature ${options.temperature}`, ...rest, receipt.seed === null ? null : `seed ${receipt.seed}`].filter(Boolean).join(", ");
}

/** What an answer was made with, in a few words; to be told from others to the same message. */
export function settingsOf(receipt, options) {
  const given = options ?? {};
  return [given.model, sampling(receipt ?? { seed: given.seed ?? null }, given), given.detail ? `${given.detail} detail` : null,
    given.json_schema ? "JSON by a schema" : null, given.stop ? `stops at ${given.stop.length === 1 ? "a text" : `${given.stop.length} texts`}` : null,
    given.system ? `system prompt “${isolated(given.system.length > SYSTEM_SHOWN ? `${given.system.slice(0, SYSTEM_SHOWN)}…` : given.system)}”` : null].filter(Boolean).join(" · ");
}

function facts(rows) {
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value, kind]) =>
    [el("dt", {}, name), el("dd", { class: kind, dir: "auto" }, value)]).flat());
}

function seen(image, picture) {
  const thumbnail = show(el("img", { alt: "", loading: "lazy" }), `/api/processed/${image.sha256}/0`);
  thumbnail.addEventListener("error", () => button.remove()); // the server keeps what the model saw for a while only
  const button = el("button", { class: "picture", type: "button", "aria-label": "Show what the model saw", on: { click: () => openTiles(image) } }, thumbnail);
  return el("div", { class: "seen" }, button, facts([
    ["Picture", picture?.name || "picture"],
    ["Original", pixels(image.original_size)],
    ["Seen as", `${pixels(image.processed_size)} in ${plural(image.tiles, "tile")}`],
    ["Tokens", `${image.tokens.toLocaleString("en")}${image.cached ? ", encoded before (from the cache)" : ""}`],
    ["Notes", image.notes.join("; ")],
  ]));
}

function heard(audio, stored) {
  return facts([
    ["Audio", stored?.name || "audio"],
    ["Original", `${clock(audio.seconds)}, ${plural(audio.channels, "channel")} at ${audio.rate.toLocaleString("en")} Hz, ${audio.codec}`],
    ["Tokens", `${audio.tokens.toLocaleString("en")}${audio.cached ? ", encoded before (from the cache)" : ""}`],
    ["Read in", milliseconds(audio.read_ms)],
    ["Notes", audio.notes.join("; ")],
  ]);
}

/** The frames that the model saw, each with its time, which leads there in the video. */
function seenVideo(video, stored) {
  const frames = video.frames.map((frame) => {
    const picture = show(el("img", { alt: "", loading: "lazy" }), `/api/processed/${frame.sha256}/${frame.place}`);
    const button = el("button", { class: "frame", type: "button", "aria-label": `Frame at ${clock(frame.time)}`,
      on: { click: () => (stored ? openVideo(stored, { at: frame.time }) : toast("This video no longer exists.")) } }, picture, el("span", {}, clock(frame.time)));
    picture.addEventListener("error", () => picture.remove()); // the server keeps what the model saw for a while only
    return button;
  });
  const cached = video.frames.filter((frame) => frame.cached).length;
  return el("div", { class: "seen-video" }, el("div", { class: "frames", role: "group", "aria-label": "Frames that the model saw", tabIndex: 0 }, frames), facts([
    ["Video", stored?.name || "video"],
    ["Original", `${pixels(video.original_size)}, ${clock(video.seconds)} at ${Number(video.fps.toPrecision(4))} frames/s, ${video.codec}`],
    ["Seen", `${plural(frames.length, "frame")} of ${video.frames_in_file.toLocaleString("en")}, as ${pixels(video.processed_size)}`],
    ["How", video.how],
    ["Tokens", `${video.tokens.toLocaleString("en")}${cached ? `, ${cached === frames.length ? "all" : plural(cached, "frame")} encoded before (from the cache)` : ""}`],
    ["Read in", `${milliseconds(video.read_ms)}${video.read_before ? ", read before" : ""}`],
    ["Notes", video.notes.join("; ")],
  ]));
}

async function openTiles(image) {
  try {
    const { tiles } = await get(`/api/processed/${image.sha256}`);
    openViewer(tiles.map((tile, index) => ({
      path: `/api/processed/${image.sha256}/${index}`, title: tiles.length > 1 ? `What the model saw, tile ${index + 1}` : "What the model saw",
      info: `${pixels([tile.width, tile.height])}, from ${pixels(image.original_size)}`, width: tile.width, height: tile.height, askable: false,
    })), 0);
  } catch (error) {
    toast(error.message);
  }
}

function times(receipt) {
  const values = STAGES.map(([name, label]) => [label, receipt[name] ?? 0]);
  const total = values.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  let start = 0;
  const bar = svg("svg", { class: "times", viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [, ms] of values) {
    bar.append(svg("rect", { x: start, y: 0, width: (ms / total) * 1000, height: 10 }));
    start += (ms / total) * 1000;
  }
  const keys = values.map(([label, ms], index) => (ms >= 0.5 ? el("span", { class: `k${index + 1}` }, `${label} ${milliseconds(ms)}`) : null));
  return el("div", {}, bar, el("div", { class: "times-keys" }, keys));
}
