// The message box: text and text files, pictures that are uploaded as soon as they are attached, and what it all would take of the context.

import { $, announce, el, icon, toast } from "../shared/dom.js";
import { isolated, plural } from "../shared/format.js";
import { openMenu, startMenu } from "../shared/menu.js";
import { imagePath, post, show, smallPath, upload, uploadPages } from "../shared/server.js";
import { options } from "./settings.js";
import { openViewer } from "./viewer.js";
import { viewerItem } from "./message.js";
import { Recorder, isAudio } from "./audio.js";
import { LONGEST, mayBeText, splitFiles, textOf, withFiles } from "./text_files.js";
import { isStill, isVideo, openVideo, partOf } from "./video.js";
import { droppedFiles } from "../table/table.js";

const COUNT_AFTER_MS = 250;
const touch = matchMedia("(pointer: coarse)").matches;

export class Composer {
  /** `about`: what the server says of its model and limits. `send(text, images, editing)`, `where()`: {conversation, parent}, `editLast()`, `anew()`: an empty chat,
   * `ready()`: whether the model is in memory, `opened()`: a promise of the conversation that is to be shown, `askOver(files)`: one question over many, `dropOldest()`: make room. */
  constructor(about, { ready, opened, send, where, editLast, anew, askOver, dropOldest }) {
    Object.assign(this, { about, ready, opened, submit: send, where, editLast, anew, askOver, dropOldest });
    this.reading = null; // a promise of the text files that are being read
    this.attached = []; // {key, image | null, preview, name, tokens, uploading}, and text files: {key, name, content}
    this.draft = null; // {key}: where what is typed is kept, another one for each conversation that is shown; null before the first
    this.editing = null;
    this.busy = false;
    this.#listen();
    this.setAbout(about);
  }

  setAbout(about) {
    this.about = about;
    for (const id of ["shoot", "pick-folder"]) $(id).hidden = !about.vision;
    const kinds = [about.vision && "pictures", about.vision && about.video && "videos", about.audio && "audio", about.vision && "PDFs", "text"].filter(Boolean).join(", ");
    $("pick-kinds").textContent = kinds[0].toUpperCase() + kinds.slice(1);
    $("record").hidden = !about.audio || !Recorder.possible;
    const tasks = Object.entries(about.tasks); // what the model's authors ask it for, and how
    $("task").hidden = !tasks.length;
    $("task").replaceChildren(el("option", { value: "" }, "Task…"), ...tasks.map(([name, words]) => el("option", { value: words }, name)));
  }

  #listen() {
    const prompt = $("prompt");
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("input", () => {
      this.refused = false;
      this.changed();
    });
    $("task").addEventListener("change", () => { // its words go into the box, where they can be read and changed
      prompt.value = $("task").value;
      $("task").value = "";
      prompt.dispatchEvent(new Event("input"));
      prompt.focus();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !touch) {
        event.preventDefault();
        this.send();
      } else if (event.key === "ArrowUp" && !prompt.value && !this.editing) {
        event.preventDefault();
        this.editLast();
      } else if (event.key === "Escape" && this.editing) {
        event.stopPropagation();
        this.stopEditing();
      }
    });
    document.addEventListener("paste", (event) => {
      const files = [...(event.clipboardData?.files ?? [])];
      if (!files.length || document.querySelector("dialog[open]")) return;
      const elsewhere = event.target instanceof HTMLInputElement; // a field of its own, which takes text
      const text = elsewhere ? "" : textBeside(files, event.clipboardData.getData("text/plain"));
      if (elsewhere && event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      if (text.trim()) this.#type(text);
      this.attach(files);
    });
    const menu = $("add-menu");
    startMenu(menu);
    let openWhenPressed = false; // then the press has closed it
    $("add").addEventListener("pointerdown", () => { openWhenPressed = menu.matches(":popover-open"); });
    $("add").addEventListener("click", () => {
      if (!openWhenPressed) openMenu(menu, $("add"));
      openWhenPressed = false;
    });
    menu.addEventListener("beforetoggle", ({ newState }) => $("add").setAttribute("aria-expanded", String(newState === "open")));
    menu.addEventListener("click", () => menu.hidePopover(), { capture: true }); // before what is chosen opens its own
    for (const [button, input] of [["pick", "files"], ["shoot", "camera"], ["welcome-pick", "files"]]) {
      $(button).addEventListener("click", () => $(input).click());
    }
    $("pick-folder").addEventListener("click", () => $("folder").click());
    $("folder").addEventListener("change", () => {
      this.askOver([...$("folder").files]);
      $("folder").value = "";
    });
    for (const id of ["files", "camera"]) {
      $(id).addEventListener("change", () => {
        this.attach([...$(id).files]);
        $(id).value = "";
      });
    }
    const recorder = new Recorder((blob, name) => this.attach([new File([blob], name, { type: blob.type })]));
    $("record").addEventListener("click", () => recorder.start());
    this.#listenToDrops();
  }

  #listenToDrops() {
    const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      $("drop").hidden = document.querySelector("dialog[open]") !== null;
    });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
    addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      $("drop").hidden = true;
      droppedFiles(event.dataTransfer).then(({ files, folders }) => {
        if (folders || files.filter((file) => !mayBeText(file)).length > this.about.images) this.askOver(files);
        else this.attach(files);
      }, (error) => toast(`The folder could not be read. ${error.message}`));
    });
  }

  /** Text that is in the box, and what its text files say. */
  get text() {
    return withFiles($("prompt").value, this.attached.filter(isText));
  }

  #fill(text, images) {
    const { words, files } = splitFiles(text);
    $("prompt").value = words;
    this.attached = [...images.map((image) => this.#known(image)), ...files.map((file) => ({ key: newKey(), ...file }))];
  }

  /** Pictures and the like that the message still takes. */
  get #room() {
    return this.about.images - this.attached.filter((one) => !isText(one)).length;
  }

  get #images() {
    return this.attached.map((one) => one.image).filter(Boolean);
  }

  attach(files) {
    const media = files.filter((file) => !mayBeText(file));
    if (media.length) this.#attachMedia(media);
    if (media.length < files.length) this.reading = Promise.all([this.reading, ...files.filter(mayBeText).map((file) => this.#read(file))]);
    $("prompt").focus();
  }

  async #read(file) {
    const { draft } = this;
    try {
      const text = await textOf(file);
      if (draft && this.draft !== draft) return; // another conversation is shown: it is not meant
      if (text === null) this.#attachMedia([file]);
      else if (text === "") toast(`${isolated(file.name)} is empty.`, { group: "files" });
      else this.#addText(file, text);
    } catch (error) { // a folder, say, or a file that has gone since
      toast(`${isolated(file.name)} could not be read. ${error.message}`, { group: "files" });
    }
  }

  #addText(file, content) {
    const already = this.attached.filter(isText).reduce((sum, one) => sum + one.content.length, 0);
    if (already + content.length > LONGEST) {
      toast(`${isolated(file.name)} was left out: the text files of one message may have ${LONGEST.toLocaleString("en")} characters.`, { group: "files" });
      return;
    }
    this.attached.push({ key: newKey(), name: file.name, content });
    announce(`${file.name} attached`);
    this.changed();
  }

  #attachMedia(files) {
    if (!this.about.vision && !this.about.audio) {
      toast(`${this.about.model} only takes text files: it has no encoder for pictures or audio.`);
      return;
    }
    const room = this.#room;
    if (files.length > room) toast(`One message takes at most ${plural(this.about.images, "picture")}; ${files.length - room} left out.`);
    for (const file of files.slice(0, Math.max(0, room))) {
      const sound = file.type.startsWith("audio/");
      if (sound ? !this.about.audio : !this.about.vision) {
        toast(`${isolated(file.name)} was left out: ${this.about.model} takes ${this.about.vision ? "pictures and videos, and no audio" : "audio alone"}.`, { group: "files" });
        continue;
      }
      if (file.type.startsWith("video/") && !this.about.video) {
        toast(`${isolated(file.name)} was left out: this server reads no videos. Its library for them, PyAV, is not installed.`, { group: "files" });
        continue;
      }
      if (file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf")) this.#addPages(file);
      else this.#add(file, file.name);
    }
  }

  /** Each page of a PDF is a picture, as far as one message takes them. */
  async #addPages(file) {
    const waiting = { key: newKey(), blob: null, image: null, preview: null, name: file.name, tokens: null };
    this.attached.push(waiting);
    waiting.uploading = uploadPages(file, file.name).then(({ images, pages }) => {
      const room = this.#room + 1;
      const taken = images.slice(0, room).map((image) => this.#known(image));
      this.attached.splice(this.attached.indexOf(waiting), 1, ...taken);
      if (pages > taken.length) toast(`${isolated(file.name)} has ${plural(pages, "page")}; the first ${taken.length} are attached, for one message takes no more.`);
      announce(`${file.name}: ${plural(taken.length, "page")} attached`);
      return true;
    }, (error) => {
      this.refused = true;
      this.#remove(waiting);
      toast(refusal(file.name, error, error.status >= 400 && error.status < 500), { group: "files" });
      return false;
    }).finally(() => this.changed());
    this.draw();
  }

  #known(image) {
    return { key: newKey(), image, preview: null, name: image.name, tokens: null, uploading: null };
  }

  /** Text as if it was typed: at the cursor, and to be undone. */
  #type(text) {
    const prompt = $("prompt");
    prompt.focus();
    if (!document.execCommand("insertText", false, text)) this.insert(text);
  }

  async #add(blob, name) {
    const isFilm = /^(video|audio)\//.test(blob.type ?? ""); // its preview comes from the server
    const one = { key: newKey(), blob, image: null, preview: isFilm ? null : URL.createObjectURL(blob), name, tokens: null };
    this.attached.push(one);
    this.#upload(one);
    this.draw();
    await one.uploading;
  }

  /** A picture that the server refuses goes; one that could not get there stays, and is tried again when it is sent. */
  #upload(one) {
    one.failed = false;
    one.uploading = upload(one.blob, one.name).then((image) => {
      one.image = image;
      announce(`${one.name || "Picture"} attached`);
      return true;
    }, (error) => {
      one.failed = true;
      const refused = error.status >= 400 && error.status < 500 && error.status !== 429;
      this.refused = refused;
      if (refused) this.#remove(one);
      toast(refusal(one.name, error, refused), { group: "files" });
      return false;
    }).finally(() => this.changed());
  }

  /** A region of another picture, to be asked about. */
  attachRegion(blob, name) {
    $("prompt").focus();
    return this.#add(blob, name);
  }

  /** What was attached, turned or cut, in its place. */
  async #replace(one, blob) {
    if (one.preview) URL.revokeObjectURL(one.preview);
    Object.assign(one, { blob, image: null, preview: URL.createObjectURL(blob), tokens: null });
    this.#upload(one);
    this.draw();
    await one.uploading;
    return one.image;
  }

  /** Not every browser shows HEIC by itself. */
  #previewFailed(one, picture) {
    if (one.preview && one.image && picture.src === one.preview) show(picture, imagePath(one.image.sha256));
  }

  #remove(one) {
    if (one.preview) URL.revokeObjectURL(one.preview);
    this.attached = this.attached.filter((other) => other !== one);
    this.changed();
  }

  /** Whether nothing can be sent now; why is told. */
  #isHeld() {
    if (this.busy) toast("An answer is being written; stop it first.");
    else if (!$("prompt").value.trim() && !this.attached.length) return true;
    else if (this.over) toast("Not sent: this conversation has no room for another message.", { action: this.where(null).parent ? { label: "Drop the oldest turns", run: () => this.dropOldest() } : null });
    else if (this.refused) this.#hold(); // it may not have been seen that the picture is not there
    else return false;
    return true;
  }

  async send() {
    if (this.sending) return;
    this.sending = true;
    const { draft } = this;
    const elsewhere = () => this.draft !== draft; // another conversation is shown: what is typed there is not meant
    try {
      await this.reading;
      if (this.#isHeld()) return;
      await this.opened();
      if (elsewhere() || this.#isHeld()) return;
      for (const one of this.attached) if (one.failed) this.#upload(one);
      this.draw();
      const here = await Promise.all(this.attached.map((one) => one.uploading ?? true));
      if (here.includes(false)) {
        this.#hold();
        return;
      }
      if (elsewhere()) return;
      if (!await this.submit(this.text, this.#images, this.editing)) return;
      if (elsewhere()) sessionStorage.removeItem(draft.key);
      else this.clear();
    } finally {
      this.sending = false;
    }
  }

  /** What is in the box, in an empty chat. */
  #moveOn() {
    if (!store("mtmd.draft.", { text: this.text, images: this.#images })) {
      toast("This message is too large to be moved: the browser has no room for it. Copy it, or leave out a file.");
      return;
    }
    this.clear();
    this.anew();
  }

  #hold() {
    this.refused = false;
    toast("Not sent: a picture could not be attached. Send again to ask without it, or attach another.");
  }

  clear() {
    for (const one of this.attached) if (one.preview) URL.revokeObjectURL(one.preview);
    [this.attached, this.editing, this.over] = [[], null, false];
    $("prompt").value = "";
    this.changed();
  }

  /** Take a message up again, its pictures too; what is sent then stands beside it. */
  edit(message) {
    this.editing = message;
    this.#fill(message.text, message.images);
    this.changed();
    $("prompt").focus();
    announce("Editing a message. Escape leaves it as it was.");
  }

  stopEditing() {
    this.clear();
    $("prompt").focus();
  }

  insert(text) {
    const prompt = $("prompt");
    prompt.value = prompt.value ? `${prompt.value.trimEnd()} ${text}` : text;
    prompt.focus();
    prompt.setSelectionRange(prompt.value.length, prompt.value.length);
    this.changed();
  }

  /** What was typed for one conversation is kept for this tab. `typed` stands in its place: by somebody who was faster than the page. */
  restore(conversation, typed = this.draft ? "" : this.text) {
    this.draft = { key: null };
    this.clear();
    this.draft.key = `mtmd.draft.${conversation ?? ""}`;
    const kept = JSON.parse(sessionStorage.getItem(this.draft.key) ?? "null");
    this.#fill(typed || (kept?.text ?? ""), kept?.images ?? []);
    this.changed();
  }

  /** What is in the box belongs to a conversation that was just begun. */
  moveDraft(conversation) {
    sessionStorage.removeItem(this.draft.key);
    this.draft.key = `mtmd.draft.${conversation}`;
    this.#keepDraft();
  }

  #keepDraft() {
    if (!this.draft?.key || this.editing) return;
    const typed = { text: this.text, images: this.#images };
    if (typed.text || typed.images.length) store(this.draft.key, typed);
    else sessionStorage.removeItem(this.draft.key);
  }

  setBusy(busy) {
    this.busy = busy;
    $("send").hidden = busy;
    $("stop").hidden = !busy;
  }

  changed() {
    const prompt = $("prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
    this.draw();
    this.#keepDraft();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
  }

  /** A part of an attached video is shown in place of all of it. */
  #trim(one) {
    openVideo(one.image, { trimmed: (start, end) => {
      one.image = { ...one.image, start, end };
      one.tokens = null;
      this.changed();
    } });
  }

  draw() {
    const items = this.attached.filter((one) => one.image && isStill(one.image)).map((one, index) => ({ ...viewerItem(one.image, index + 1), replace: (blob) => this.#replace(one, blob) }));
    const thumbs = this.attached.map((one) => {
      if (isText(one)) return this.#textThumb(one);
      const picture = el("img", { alt: one.name || "Picture", on: { error: () => this.#previewFailed(one, picture) } });
      if (one.preview) picture.src = one.preview;
      else if (one.image && !isAudio(one.image)) show(picture, isVideo(one.image) ? smallPath(one.image.sha256) : imagePath(one.image.sha256));
      const retry = one.failed && el("button", { class: "retry", type: "button", "aria-label": `Try again to attach ${one.name || "picture"}`, on: { click: () => { this.#upload(one); this.draw(); } } }, icon("again"));
      const open = () => { if (isVideo(one.image)) this.#trim(one); else if (isAudio(one.image)) openVideo(one.image); else if (one.image) openViewer(items, items.findIndex((item) => item.image === one.image)); };
      return el("div", { class: `thumb${one.image ? "" : one.failed ? " failed" : " loading"}`, role: "listitem" },
        el("button", { class: "picture", type: "button", "aria-label": isVideo(one.image) ? `Play or cut ${one.name || "video"}, ${partOf(one.image)}` : isAudio(one.image) ? `Play ${one.name || "audio"}, ${partOf(one.image)}` : `Show ${one.name || "picture"} large`, on: { click: open } }, isAudio(one.image) ? icon("sound") : picture,
          one.image && !isStill(one.image) ? el("span", { class: "video-part" }, partOf(one.image)) : null), retry,
        el("button", { class: "off", type: "button", "aria-label": `Remove ${one.name || "picture"}`, on: { click: () => { this.#remove(one); $("prompt").focus(); } } }, icon("close")),
        el("span", { class: "thumb-tokens" }, one.failed ? "not attached" : one.tokens === null ? " " : plural(one.tokens, "token")));
    });
    $("attached").replaceChildren(...thumbs);
    $("editing").hidden = !this.editing;
  }

  #textThumb(one) {
    return el("div", { class: "thumb text-file", role: "listitem", title: one.name }, el("span", { class: "picture" }, icon("file")),
      el("button", { class: "off", type: "button", "aria-label": `Remove ${one.name}`, on: { click: () => { this.#remove(one); $("prompt").focus(); } } }, icon("close")),
      el("span", { class: "file-name", dir: "auto" }, one.name));
  }

  async #count() {
    this.counting?.abort();
    this.counting = new AbortController();
    const images = this.attached.filter((one) => one.image);
    const { conversation, parent } = this.where(this.editing);
    const { text } = this;
    if ((!text && !images.length && !parent) || !this.ready()) {
      [$("meter").hidden, this.over] = [true, false];
      return;
    }
    try {
      const count = await this.count(this.where(this.editing), this.counting.signal);
      if (!count.in_memory) {
        [$("meter").hidden, this.over] = [true, false];
        return;
      }
      for (const [is, all] of [[isStill, count.image_tokens], [isVideo, count.video_tokens], [isAudio, count.audio_tokens]]) {
        const ours = images.filter((one) => is(one.image));
        const own = ours.length ? all.slice(-ours.length) : [];
        ours.forEach((one, index) => { one.tokens = own[index] ?? null; });
      }
      this.draw();
      this.#showCount(count, parent);
    } catch (error) {
      if (error.name === "AbortError") return;
      [$("meter").hidden, this.over] = [true, false];
      if (images.length) toast(error.message);
    }
  }

  /** Tokens of the draft behind what stands before it; of that the model sees what stands from `since` on. Without numbers where the model is not `in_memory`. */
  count({ conversation, parent, since }, signal) {
    const { system, detail, model, no_sound } = options();
    const images = this.attached.filter((one) => one.image).map((one) => asSent({ ...one.image, name: one.name }));
    return post("/api/count", { conversation, parent, text: this.text, images,
      options: { ...(model ? { model } : {}), ...(system ? { system } : {}), ...(detail ? { detail } : {}), ...(no_sound ? { no_sound } : {}), ...(since ? { since } : {}) } }, { signal });
  }

  #showCount({ prompt_tokens: tokens, context }, parent) {
    const over = tokens >= context;
    this.over = over;
    $("meter").hidden = false;
    $("meter").classList.toggle("full", over);
    const bar = $("meter-bar");
    [bar.max, bar.high, bar.value] = [context, context * 0.8, Math.min(tokens, context)];
    const numbers = `${tokens.toLocaleString("en")} of ${context.toLocaleString("en")}`;
    $("meter-text").replaceChildren(numbers, el("span", { class: "unit" }, " tokens"), over ? ": too long" : "",
      ...(over && parent ? [el("button", { class: "link", type: "button", on: { click: () => this.dropOldest() } }, "Drop the oldest turns"),
        el("button", { class: "link", type: "button", on: { click: () => this.#moveOn() } }, "Continue in a new chat")] : []));
  }
}

/** What was copied together with files: a spreadsheet gives its cells both as text and as a picture, a file manager gives the names or
 * paths of the files, which nobody meant to write. */
function textBeside(files, text) {
  const names = new Set(files.map(({ name }) => name));
  const lines = text.split(/[\r\n]+/).map((line) => line.trim()).filter(Boolean);
  return lines.every((line) => names.has(line) || names.has(nameIn(line))) ? "" : text;
}

/** The last part of a path or of a file's address. */
function nameIn(path) {
  const last = path.split(/[/\\]/).at(-1);
  try {
    return path.startsWith("file:") ? decodeURIComponent(last) : last;
  } catch {
    return last;
  }
}

/** An attachment as requests have it. */
export const asSent = ({ sha256, name, kind, start, end }) => ({ sha256, name, ...(isVideo({ kind }) ? { start: start ?? null, end: end ?? null } : {}) });
const isText = (one) => one.content !== undefined;
const newKey = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Why a picture is not attached: which file, what was found in it and what is taken. */
function refusal(name, error, refused) {
  const file = name ? isolated(name) : "The picture";
  if (refused && ["invalid_image", "invalid_audio"].includes(error.code)) return `${file}: ${error.message.replace(/^(picture|image|audio): /i, "")}`;
  return `${file} is not attached. ${error.message}`;
}

/** Keep a draft in this tab's storage. One that is too large for it is not kept: false. */
function store(key, draft) {
  try {
    sessionStorage.setItem(key, JSON.stringify(draft));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    sessionStorage.removeItem(key);
    return false;
  }
}
