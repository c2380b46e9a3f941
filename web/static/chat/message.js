// One message of the thread as elements: the user's with its pictures, an answer with its receipt and what can be done with it.

import { copyText, el, icon, iconButton } from "../shared/dom.js";
import { pixels, plural } from "../shared/format.js";
import { imagePath, show } from "../shared/server.js";
import { chosenUnits, figure, inPixels } from "./regions.js";
import { receiptOf } from "./receipt.js";
import { openViewer } from "./viewer.js";

const WORK = { encode: "Looking at the pictures", prefill: "Reading" };

export const viewerItem = (image, number, grounding, sizes) => ({
  path: imagePath(image.sha256), title: image.name || `Picture ${number}`, info: pixels([image.width, image.height]),
  width: image.width, height: image.height, askable: true, grounding, sizes, number, image,
});

/** `context`: {tree, model, last, running, act}, `act` with the functions behind the buttons. */
export function userMessage(message, context) {
  const { tree, act } = context;
  const before = tree.picturesBefore(message).length;
  const items = message.images.map((image, index) => viewerItem(image, before + index + 1));
  const pictures = message.images.map((image, index) => el("button", {
    class: "picture", type: "button", "aria-label": `Show ${image.name || "picture"} large`, on: { click: () => openViewer(items, index) },
  }, show(el("img", { alt: image.name || "Attached picture", width: image.width, height: image.height }), imagePath(image.sha256))));
  return el("article", { class: `message user${context.last ? " last" : ""}`, id: `m-${message.id}`, "aria-label": "You" },
    pictures.length ? el("div", { class: `pictures${pictures.length > 1 ? " many" : ""}` }, pictures) : null,
    el("div", { class: "turn" }, el("div", { class: "actions" }, branches(message, context), copyButton(message.text),
      iconButton("edit", "Edit", () => act.edit(message))), el("div", { class: "bubble" }, message.text)),
    context.last && !context.running ? el("div", { class: "problem" }, el("span", {}, context.problem || "This message has no answer."),
      el("button", { class: "button", type: "button", on: { click: () => act.answer(message) } }, context.problem ? "Try again" : "Answer")) : null);
}

export function answerMessage(message, context) {
  const { act } = context;
  const made = el("article", { class: `message answer${context.last ? " last" : ""}`, id: `m-${message.id}`, "aria-label": "Answer" });
  if (message.state === "running") return made;
  const text = el("div", { class: "text" });
  text.innerHTML = message.html; // rendered and cleaned by the server
  if (message.text) made.append(text);
  if (message.regions) made.append(marked(message, context));
  const ending = { stopped: "Stopped.", interrupted: "Cut off when the server ended." }[message.state];
  if (ending) made.append(el("p", { class: "aside" }, ending));
  if (message.state === "failed") {
    made.append(el("div", { class: "problem" }, el("span", {}, message.error ?? "The answer failed."),
      el("button", { class: "button", type: "button", on: { click: () => act.again(message) } }, "Try again")));
  } else if (!message.text && !ending) made.append(el("p", { class: "aside" }, "The model said nothing."));
  if (message.unsaved) made.append(el("div", { class: "problem" }, `This answer could not be saved. ${message.unsaved}`));
  made.append(el("div", { class: "foot" },
    message.receipt ? receiptOf(message.receipt, message.options, context.tree.picturesBefore(message)) : null,
    el("div", { class: "actions" }, message.text ? copyButton(message.text) : null,
      iconButton("again", "Answer again", () => act.again(message)), branches(message, context))));
  return made;
}

/** The answer's boxes over the last picture before it. */
function marked(message, context) {
  const pictures = context.tree.picturesBefore(message);
  const image = pictures.at(-1);
  if (!image) return "";
  const seen = message.receipt?.images.at(-1);
  const sizes = { original: [image.width, image.height], processed: seen?.processed_size ?? [image.width, image.height] };
  const grounding = message.regions;
  const units = () => chosenUnits(context.model);
  const open = () => openViewer([viewerItem(image, pictures.length, grounding, sizes)], 0, context.redraw);
  const copy = el("button", { class: "link", type: "button", on: { click: () => copyText(JSON.stringify(inPixels(grounding, units(), sizes), null, 1)) } }, "copy in pixels");
  return el("div", { class: "grounding" }, figure(image, grounding, units, sizes, open),
    el("p", { class: "aside" }, `${plural(grounding.regions.length, "region")} marked · `, copy));
}

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await copyText(text);
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

function branches(message, { tree, act }) {
  const all = tree.siblings(message);
  if (all.length < 2) return null;
  const at = all.indexOf(message.id);
  const step = (by, name, label) => {
    const button = iconButton(name, label, () => act.show(all[at + by]));
    button.disabled = !all[at + by];
    return button;
  };
  return el("span", { class: "branches" }, step(-1, "left", "Previous version"), el("span", {}, `${at + 1} / ${all.length}`), step(1, "right", "Next version"));
}

/** The part of an answer that grows: plain text, and before the first of it how far the work is. */
export class Growing {
  constructor(target) {
    this.text = "";
    this.words = el("span", {});
    this.bar = el("progress", { "aria-label": "Progress", hidden: true });
    this.progress = el("div", { class: "progress" }, el("span", { class: "dot" }), this.words, this.bar);
    this.plain = el("div", { class: "text plain" });
    target.append(this.progress, this.plain);
  }

  take(event) {
    if (event.type === "text") {
      this.text += event.text;
      this.plain.append(event.text);
      this.progress.hidden = this.text !== "";
    } else if (event.type === "progress") {
      const { stage, done, total } = event;
      this.words.textContent = stage === "encode" && total > 1 ? `Encoding tile ${Math.min(done + 1, total)} of ${total}` : WORK[stage] ?? "Working";
      this.bar.hidden = total < 2;
      if (total) [this.bar.max, this.bar.value] = [total, done];
    }
  }
}
