// One message of the thread as elements: the user's with its pictures, an answer with its receipt and what can be done with it.

import { copyText, el, icon, iconButton, toast } from "../shared/dom.js";
import { pixels, plural } from "../shared/format.js";
import { codeBlock } from "../markdown/code.js";
import { AnswerText, answerOf } from "../markdown/view.js";
import { imagePath, sentence, show } from "../shared/server.js";
import { chosenUnits, figure, inPixels, withoutPlaces } from "./regions.js";
import { receiptOf, settingsOf } from "./receipt.js";
import { audioPlayer, isAudio } from "./audio.js";
import { splitFiles } from "./text_files.js";
import { isStill, isVideo, linkTimes, videoButton } from "./video.js";
import { askAboutBox, openViewer } from "./viewer.js";
import { isBeyondDemo } from "./welcome.js";

const LARGEST = [320, 240]; // CSS pixels of a picture in the thread
const SMALLEST = 48;
const AROUND = 62; // of the window's width: padding, frame, and the room that a scroll bar has on both sides
const REGIONS_NAMED = 12;
const ENDINGS = { stopped: "Stopped.", interrupted: "Interrupted when the server stopped.", lost: "The connection was lost here." };
const RATE_EVERY_MS = 300;
const WORK = { encode: "Looking at the pictures", prefill: "Reading" };

export const viewerItem = (image, number, grounding, sizes) => ({
  path: imagePath(image.sha256), title: image.name || `Picture ${number}`, info: pixels([image.width, image.height]),
  width: image.width, height: image.height, askable: true, grounding, sizes, number, image,
});

/** As large as a picture of any shape is shown in the thread: whole, in its own proportions, never larger than it is, and with
 * room for a finger. */
function shownSize({ width, height }) {
  const widest = Math.min(LARGEST[0], innerWidth - AROUND);
  const scale = Math.min(widest / width, LARGEST[1] / height, 1);
  return { width: Math.max(SMALLEST, Math.round(width * scale)), height: Math.max(SMALLEST, Math.round(height * scale)) };
}

/** `context`: {tree, model, last, running, act, view, isFull, old}, `act` with the functions behind the buttons, `view(answer)` with what draws its text,
 * `isFull(answer)`: whether it ended because the context had no more room,
 * `old`: the element that the message had while it was being written. */
export function userMessage(message, context) {
  const { tree, act } = context;
  const stills = message.images.filter(isStill);
  const before = stills.length ? tree.picturesBefore(message).filter(isStill).length : 0;
  const items = stills.map((image, index) => viewerItem(image, before + index + 1));
  const pictures = message.images.map((image) => (isVideo(image) ? videoButton(image) : isAudio(image) ? audioPlayer(image) : el("button", {
    class: "picture", type: "button", "aria-label": `Show ${image.name || "picture"} large`, on: { click: () => openViewer(items, stills.indexOf(image)) },
  }, show(el("img", { alt: image.name || "Attached picture", ...shownSize(image) }), imagePath(image.sha256)))));
  const { words, files } = splitFiles(message.text);
  return el("article", { class: `message user${context.last ? " last" : ""}`, id: `m-${message.id}`, "aria-label": "You" },
    context.since === message.id ? el("p", { class: "dropped" }, "The messages above were dropped to make room; the model does not see them.") : null,
    pictures.length ? el("div", { class: `pictures${pictures.length > 1 ? " many" : ""}` }, pictures) : null,
    el("div", { class: "turn" }, el("div", { class: "actions" }, branches(message, context), copyButton(message.text),
      iconButton("edit", "Edit", () => act.edit(message))), el("div", { class: "bubble" }, words, files.map(fileIn))),
    context.last && !context.running ? el("div", { class: "problem" }, el("span", {}, context.problem || "This message has no answer."),
      el("button", { class: "button", type: "button", on: { click: () => act.answer(message) } }, context.problem ? "Try again" : "Answer")) : null);
}

/** A text file of a message, folded; its text is laid out when it is opened. */
function fileIn({ name, content }) {
  const type = /\.(\w+)$/.exec(name)?.[1] ?? "";
  const made = el("details", { class: "file", on: { toggle: () => { if (made.open && made.children.length === 1) made.append(el("div", { class: "text" }, codeBlock(content, type, false))); } } },
    el("summary", {}, icon("file"), el("span", { dir: "auto" }, name), el("span", { class: "soft" }, plural(content.split("\n").length, "line"))));
  return made;
}

export function answerMessage(message, context) {
  const { act } = context;
  const made = context.old ?? el("article", { id: `m-${message.id}`, "aria-label": "Answer" });
  made.className = `message answer${context.last ? " last" : ""}`;
  const places = message.regions && marked(message, context);
  const draw = (words) => context.view(message).draw(words, false, places ? (answer) => withoutPlaces(answer).words : undefined).element;
  const text = message.state !== "running" && message.text ? draw(message.text) : null;
  for (const part of [...made.children]) if (part !== text) part.remove();
  if (message.state === "running") return made;
  if (text && text.parentNode !== made) made.append(text); // a long one that has grown here stays where it is: moved, all of it would be laid out anew
  const video = text && message.receipt?.videos?.length ? context.tree.picturesBefore(message).filter(isVideo).at(-1) : null;
  const audio = text && message.receipt?.audio?.length ? context.tree.picturesBefore(message).filter(isAudio).at(-1) : null;
  if (video || audio) linkTimes(text, video ?? audio);
  if (places) text.before(places); // the picture first
  if (isBeyondDemo(message.receipt, context.tree.picturesBefore(message))) made.append(el("p", { class: "aside demo-answer" }, "The demo model knows drawn shapes, short words and numbers; its answers about other pictures are guesses."));
  const ending = ENDINGS[message.state];
  const cut = message.receipt?.finish === "length" && message.state === "complete";
  if (message.text && (ending || cut)) made.append(endOf(message, ending ?? (context.isFull(message) ? "The context is full." : "Reached the length limit of the settings."), context));
  else if (ending) made.append(el("p", { class: "aside" }, ending));
  if (message.state === "failed") {
    made.append(el("div", { class: "problem" }, el("span", {}, sentence(message.error ?? "The answer failed.")),
      el("button", { class: "button", type: "button", on: { click: () => act.again(message) } }, "Try again")));
  } else if (!message.text && !ending) made.append(el("p", { class: "aside" }, "The model said nothing."));
  if (message.unsaved) made.append(el("div", { class: "problem" }, `This answer could not be saved. ${message.unsaved}`));
  made.append(el("div", { class: "foot" },
    message.receipt ? receiptOf(message.receipt, message.options, () => context.tree.picturesBefore(message)) : null,
    el("div", { class: "actions" }, message.text ? copyButton(answerOf(message.text)) : null,
      iconButton("again", "Answer again", () => act.again(message), "Answer again with another seed"), branches(message, context))));
  return made;
}

/** Where an answer ended early, and the way on. */
function endOf(message, words, { act, isFull }) {
  const button = isFull(message) ? el("button", { class: "link", type: "button", on: { click: () => act.goOnWithRoom(message) } }, "Drop the oldest turns and continue") : message.state === "lost" ? el("button", { class: "link", type: "button", on: { click: () => act.look() } }, "Look again")
    : el("button", { class: "link", type: "button", title: "Continue from here as another version of this answer", on: { click: () => act.goOn(message) } }, "Continue");
  return el("p", { class: "aside" }, `${words} `, button);
}

/** The answer's boxes over the last picture before it. */
function marked(message, context) {
  const pictures = context.tree.picturesBefore(message).filter(isStill);
  const image = pictures.at(-1);
  if (!image) return null;
  const seen = message.receipt?.images.at(-1);
  const sizes = { original: [image.width, image.height], processed: seen?.processed_size ?? [image.width, image.height] };
  const grounding = message.regions;
  const units = () => chosenUnits(context.model);
  const open = () => openViewer([viewerItem(image, pictures.length, grounding, sizes)], 0, context.redraw);
  const copy = el("button", { class: "link", type: "button", on: { click: () => copyText(JSON.stringify(inPixels(grounding, units(), sizes), null, 1)) } }, "copy in pixels");
  return el("div", { class: "grounding" }, figure(image, grounding, units, sizes, open),
    el("div", { class: "regions" }, grounding.regions.slice(0, REGIONS_NAMED).map((region, index) => (region.kind === "box" ? el("button", {
      class: "region", type: "button", title: "Ask about this part of the picture", on: { click: () => askAboutBox(viewerItem(image, pictures.length, grounding, sizes), index).catch((error) => toast(error.message)) },
    }, icon("region"), el("span", { dir: "auto" }, region.label || `Region ${index + 1}`)) : null))),
    el("p", { class: "aside" }, `${plural(grounding.regions.length, "region")} marked · `, copy), asWritten(withoutPlaces(answerOf(message.text)).notation));
}

/** The places that were drawn, folded. */
const asWritten = (notation) => (notation ? el("details", { class: "notation" }, el("summary", {}, "As the model wrote it"),
  el("div", { class: "text" }, codeBlock(notation, /^[[{]/.test(notation) ? "json" : "", false))) : null);

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await copyText(text);
    button.replaceChildren(icon("done"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** All answers to one message beside one another, each with what it was made with. `grown(answer)`: elements of one that is being
 * written. */
export function sideBySide(answers, context, grown) {
  return el("div", { class: "compare", role: "group", "aria-label": "Answers side by side" },
    el("div", { class: "compare-top" }, el("span", { class: "soft" }, `${plural(answers.length, "answer")} to the same message`),
      el("button", { class: "link", type: "button", on: { click: () => context.act.again(answers.at(-1)) } }, "Another answer, with the current settings"),
      el("button", { class: "link", type: "button", on: { click: () => context.act.compare(answers[0].parent, false) } }, "One at a time")),
    el("div", { class: `columns${answers.length === 2 ? " two" : ""}`, tabIndex: 0, role: "group", "aria-label": "Answers" }, answers.map((answer) => {
      const made = answerMessage(answer, { ...context, last: true, compared: true, old: null });
      made.append(...grown(answer));
      made.prepend(el("p", { class: "settings-of" }, settingsOf(answer.receipt, answer.options)));
      if (answer.state !== "running") made.append(goOnWith(answer, context));
      return made;
    })));
}

const goOnWith = (answer, { act }) => el("button", { class: "button go-on", type: "button", on: { click: () => act.goOnWith(answer) } }, "Continue with this one");

function branches(message, { tree, act, compared }) {
  if (compared) return null;
  const all = tree.siblings(message);
  if (all.length < 2) return null;
  const at = all.indexOf(message.id);
  const step = (by, name, label) => {
    const button = iconButton(name, label, () => act.show(all[at + by]));
    button.disabled = !all[at + by];
    return button;
  };
  return el("span", { class: "branches" }, step(-1, "left", "Previous version"), el("span", {}, `${at + 1} / ${all.length}`), step(1, "right", "Next version"),
    message.role === "assistant" ? iconButton("columns", "Side by side", () => act.compare(message.parent, true)) : null);
}

/** What is told while an answer's model is being loaded. */
export const loadingWords = ({ model, stage, progress }) => (stage ? `Loading ${model}: ${stage}${progress ? `, ${Math.round(100 * progress)} %` : ""}` : `Waiting for ${model}`);

/** The part of an answer that grows: its text with how fast it comes, and before the first of it how far the work is. */
export class Growing {
  constructor() {
    this.text = "";
    this.tokens = 0;
    this.words = el("span", {});
    this.bar = el("progress", { "aria-label": "Progress", hidden: true });
    this.progress = el("div", { class: "progress" }, el("span", { class: "dot" }), this.words, this.bar);
    this.view = new AnswerText();
    this.rate = el("div", { class: "rate", hidden: true });
    this.lost = el("div", { class: "reconnecting", role: "status", hidden: true }, el("span", { class: "dot" }),
      el("span", {}, "Reconnecting to the server… What was read stays here."));
    this.elements = [this.progress, this.view.element, this.lost, this.rate];
  }

  take(event) {
    if (event.type === "text") {
      this.text += event.text;
      this.view.grow(this.text);
      this.progress.hidden = this.text !== "";
      this.#measure(event.tokens ?? 0);
    } else if (event.type === "loading") {
      this.progress.hidden = false; // of one that goes on, there is a text already
      this.words.textContent = loadingWords(event);
      this.bar.hidden = event.progress === null;
      [this.bar.max, this.bar.value] = [1, event.progress ?? 0];
    } else if (event.type === "progress") {
      const { stage, done, total } = event;
      this.words.textContent = stage === "encode" && total > 1 ? `Encoding tile ${Math.min(done + 1, total)} of ${total}` : WORK[stage] ?? "Working";
      this.bar.hidden = total < 2;
      if (total) [this.bar.max, this.bar.value] = [total, done];
    }
  }

  /** Tokens a second since the first that was seen to come; a text that was there before is not counted. */
  #measure(tokens) {
    const now = performance.now();
    if (this.began === undefined) {
      if (tokens) this.began = this.told = now;
      return;
    }
    this.tokens += tokens;
    if (now - this.told < RATE_EVERY_MS) return;
    this.told = now;
    const rate = this.tokens / ((now - this.began) / 1000);
    this.rate.hidden = false;
    this.rate.textContent = `${rate.toLocaleString("en", { maximumFractionDigits: rate < 10 ? 1 : 0 })} tokens/s`;
  }

  /** Whether the server is there. */
  connected(whether) {
    this.lost.hidden = whether;
    this.view.element.classList.toggle("waiting", !whether);
    if (!whether) [this.began, this.tokens, this.rate.hidden] = [undefined, 0, true];
  }
}
