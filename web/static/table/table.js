// One question over many pictures: a row for each, answered as many at once as the server has places. Each row is a branch of the
// conversation, so that it is kept, found and exported as any, and goes on where it was left.

import { $, announce, el, toast } from "../shared/dom.js";
import { STAGES, isolated, milliseconds, plural } from "../shared/format.js";
import { events, imagePath, post, save, show, smallPath, upload } from "../shared/server.js";
import { AnswerText, answerOf } from "../markdown/view.js";
import { loadingWords } from "../chat/message.js";
import { openViewer } from "../chat/viewer.js";
import { csvOf } from "./csv.js";

const PICTURES = /\.(?:jpe?g|png|webp|gif|bmp|tiff?|avif|hei[cf])$/i;
const MOST_FILES = 2000;
const COLUMNS = [["name", "Picture"], ["answer", "Answer"], ["tokens", "Tokens"], ["ms", "Time"]];
const ORDER = { name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }), answer: (a, b) => a.text.localeCompare(b.text, "en", { numeric: true }),
  tokens: (a, b) => a.tokens - b.tokens, ms: (a, b) => a.ms - b.ms };

const isPicture = (file) => file.type.startsWith("image/") || PICTURES.test(file.name);

/** Files and the files of folders that were dropped, by path; hidden ones are left out. */
export async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return { files: [...transfer.files], folders: false };
  const found = [];
  const walk = async (entry, path) => {
    if (entry.name.startsWith(".") || found.length >= MOST_FILES) return;
    if (entry.isFile) found.push(await new Promise((resolve, reject) => { entry.file(resolve, reject); }));
    else {
      const reader = entry.createReader();
      for (let some; (some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); })).length;) for (const one of some) await walk(one, `${path}${entry.name}/`);
    }
  };
  const folders = entries.some((entry) => entry.isDirectory);
  for (const entry of entries) await walk(entry, "");
  return { files: found, folders };
}

/** Rows of a conversation as the tree has them, [] where it is none over many pictures. */
export const rowsOf = (tree) => tree.siblings({ parent: null }).map((id) => tree.messages.get(id)).filter((message) => message.options?.table);

export class Table {
  /** `places`: answered at once. `openRow(message)`: show it as a conversation. `changed()`: rows came. `ended()`: nothing is being
   * answered any more. `options()`: how answers are to be made. */
  constructor({ places, openRow, changed, ended, options }) {
    Object.assign(this, { places, openRow, changed, ended, options });
    this.sort = ["", 1];
    this.rows = new Map(); // id of the message -> what is shown of it
    this.running = new Map(); // id of the message -> {answer, controller}
    this.#listen();
  }

  #listen() {
    $("table-stop").addEventListener("click", () => this.stop());
    $("table-go").addEventListener("click", () => this.go());
    $("table-csv").addEventListener("click", () => this.#download());
    $("table-head").append(...COLUMNS.map(([name, label]) => {
      const button = el("button", { type: "button", on: { click: () => this.#sortBy(name) } }, label);
      return el("th", { scope: "col", class: `c-${name}`, dataset: { column: name } }, button);
    }));
    $("over-form").addEventListener("submit", () => this.#begin());
  }

  /** Ask what is to be asked of so many files. */
  ask(files) {
    const pictures = files.filter(isPicture).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    if (!pictures.length) {
      toast(`Found no pictures among ${plural(files.length, "file")}.`);
      return;
    }
    this.files = pictures;
    const others = files.length - pictures.length;
    $("over-count").textContent = `${plural(pictures.length, "picture")}${others ? `; ${plural(others, "other file")} left out` : ""}. Each is asked by itself, and the answers become a table.`;
    $("over").returnValue = "";
    $("over").showModal();
  }

  async #begin() {
    const [files, question] = [this.files, $("over-question").value.trim()];
    if (!files || !question) return;
    this.files = null;
    await this.start(question, files.map((file) => ({ name: file.name, image: () => upload(file, file.name) })));
  }

  /** `pictures`: {name, image}; `image()` gives the stored one. */
  async start(question, pictures) {
    const conversation = await post("/api/conversations", { title: `${question.slice(0, 60)} – ${plural(pictures.length, "picture")}` });
    const skipped = [];
    const here = await this.changed(conversation, null);
    for (const { name, image } of pictures) {
      if (!this.#shown(here)) break; // somebody has gone elsewhere: what is there stays
      try {
        const { sha256 } = await image();
        const sent = await post(`/api/conversations/${conversation.id}/messages`, { text: question, images: [{ sha256, name: name.slice(0, 200) }], table: true });
        await this.changed(sent.conversation, sent.message);
        if (!this.stopped) this.go(); // the rest of the rows are kept all the same
      } catch (error) {
        skipped.push(`${isolated(name)}: ${error.message}`);
        if (error.status === 0 || error.status >= 500) break;
      }
    }
    if (skipped.length) toast(`${plural(skipped.length, "picture")} left out. ${skipped.slice(0, 3).join(" ")}`, { sticky: true });
  }

  #shown(conversation) {
    return this.conversation === conversation;
  }

  /** Show the rows of `conversation`; `tree` has its messages. */
  show(conversation, tree) {
    const other = this.conversation !== conversation;
    [this.conversation, this.tree] = [conversation, tree];
    if (other) this.#clear();
    for (const message of rowsOf(tree)) {
      if (!this.rows.has(message.id)) this.rows.set(message.id, this.#row(message));
      const answer = tree.messages.get(tree.children.get(message.id)?.at(-1));
      const row = this.rows.get(message.id);
      if (answer && row.answer !== answer) this.#put(row, answer);
      if (answer?.state === "running" && !this.running.has(message.id)) this.#follow(row, answer);
    }
    this.#draw();
  }

  hide() {
    this.conversation = null;
    this.#clear();
  }

  #clear() {
    for (const { controller } of this.running.values()) controller.abort();
    this.running.clear();
    this.rows.clear();
    [this.going, this.stopped, this.refused, this.sort] = [false, false, "", ["", 1]];
    $("table-rows").replaceChildren();
  }

  #row(message) {
    const [image] = message.images;
    const name = image?.name || "Picture";
    const row = { message, name, text: "", tokens: 0, ms: 0, state: "", view: new AnswerText() };
    const picture = el("button", { class: "picture", type: "button", "aria-label": `Show ${name} large`, on: { click: () => this.#large(row) } },
      show(el("img", { alt: "", loading: "lazy", width: 56, height: 56 }), smallPath(image.sha256)));
    row.note = el("span", { class: "soft" });
    [row.tokensCell, row.msCell] = [el("td", { class: "number c-tokens" }), el("td", { class: "number c-ms" })];
    row.open = el("button", { class: "link", type: "button", title: "Open as a conversation", hidden: true, on: { click: () => this.openRow(message) } }, "Open");
    row.element = el("tr", {}, el("th", { scope: "row", class: "c-name" }, el("div", { class: "named" }, picture, el("span", { dir: "auto" }, name))),
      el("td", { class: "c-answer" }, row.view.element, row.note, " ", row.open), row.tokensCell, row.msCell);
    return row;
  }

  #large(row) {
    const rows = this.#ordered();
    openViewer(rows.map(({ name, message: { images: [image] } }) => ({ path: imagePath(image.sha256), title: name, info: "", width: image.width, height: image.height, askable: false })), rows.indexOf(row));
  }

  #put(row, answer) {
    Object.assign(row, { answer, text: answerOf(answer.text).trim(), state: answer.state });
    const { receipt } = answer;
    row.tokens = receipt?.output_tokens ?? 0;
    row.ms = receipt ? STAGES.reduce((sum, [name]) => sum + (receipt[name] ?? 0), 0) : 0;
    row.tokensCell.textContent = receipt ? row.tokens.toLocaleString("en") : "";
    row.msCell.textContent = receipt ? milliseconds(row.ms) : "";
    row.note.textContent = { failed: answer.error ?? "Failed.", stopped: "Stopped.", interrupted: "Interrupted when the server stopped." }[answer.state] ?? "";
    row.open.hidden = answer.state === "running";
    row.view.draw(answer.text, answer.state === "running");
  }

  #open() {
    return [...this.rows.values()].filter((row) => (!row.answer || ["interrupted", "stopped", "failed"].includes(row.state)) && !this.running.has(row.message.id));
  }

  /** Answer what has no answer yet. */
  async go() {
    [this.going, this.stopped, this.refused] = [true, false, ""];
    const conversation = this.conversation;
    while (this.going && this.conversation === conversation && this.running.size < this.places) {
      const row = this.#open().find((one) => !one.tried);
      if (!row) break;
      row.tried = true;
      this.running.set(row.message.id, { controller: new AbortController() });
      this.#ask(row, conversation);
    }
    if (!this.running.size) this.#end();
    this.#draw();
  }

  async #ask(row, conversation) {
    try {
      const answer = await post(`/api/conversations/${conversation}/answers`, { parent: row.message.id, options: this.options() });
      if (this.conversation !== conversation) return;
      this.tree.put(answer);
      if (this.running.get(row.message.id)?.stopped) await post(`/api/answers/${answer.id}/stop`); // somebody was faster than the server
      await this.#follow(row, answer);
    } catch (error) {
      this.running.delete(row.message.id);
      if (this.conversation !== conversation) return;
      row.note.textContent = error.message;
      if (error.status === 0 || error.status === 429 || error.status >= 500) [this.going, this.refused] = [false, error.message];
    }
    if (this.going) this.go();
    else if (!this.running.size) this.#end();
    this.#draw();
  }

  async #follow(row, answer) {
    const controller = new AbortController();
    this.running.set(row.message.id, { answer, controller });
    let text = "";
    this.#put(row, answer);
    try {
      for await (const event of events(answer.id, controller.signal)) {
        if (event.type === "loading") row.note.textContent = loadingWords(event);
        else if (event.type === "text") {
          if (!text) row.note.textContent = "";
          row.view.grow(text += event.text);
        } else if (event.type === "end" && event.message?.id) {
          this.tree.put(event.message);
          this.#put(row, event.message);
        }
      }
    } catch (error) {
      if (!controller.signal.aborted) row.note.textContent = error.message;
    }
    if (this.running.get(row.message.id)?.controller === controller) this.running.delete(row.message.id);
    this.#draw();
  }

  #end() {
    this.going = false;
    this.ended();
    for (const row of this.rows.values()) row.tried = false;
    const open = this.#open().length;
    if (this.rows.size && !open) announce(`All ${plural(this.rows.size, "picture")} answered`);
  }

  async stop() {
    [this.going, this.stopped] = [false, true];
    for (const one of this.running.values()) one.stopped = true;
    await Promise.all([...this.running.values()].filter(({ answer }) => answer).map(({ answer }) => post(`/api/answers/${answer.id}/stop`).catch((error) => toast(error.message))));
    this.#end();
    this.#draw();
  }

  #sortBy(name) {
    this.sort = [name, this.sort[0] === name ? -this.sort[1] : 1];
    this.#draw();
  }

  #ordered() {
    const [name, way] = this.sort;
    const rows = [...this.rows.values()];
    return name ? rows.sort((a, b) => way * ORDER[name](a, b)) : rows;
  }

  #draw() {
    if (!this.conversation) return;
    this.#ordered().forEach((row, index) => {
      const there = $("table-rows").children[index];
      if (there !== row.element) $("table-rows").insertBefore(row.element, there ?? null);
    });
    for (const head of $("table-head").children) {
      const [name, way] = this.sort;
      head.setAttribute("aria-sort", head.dataset.column === name ? (way > 0 ? "ascending" : "descending") : "none");
    }
    const [all, open] = [this.rows.size, this.#open().length];
    const done = all - open - this.running.size;
    const first = this.rows.values().next().value;
    $("table-question").textContent = first?.message.text ?? "";
    $("table-state").textContent = `${done.toLocaleString("en")} of ${plural(all, "picture")} answered${this.refused ? `. ${this.refused}` : ""}`;
    [$("table-bar").max, $("table-bar").value] = [Math.max(1, all), done];
    $("table-bar").hidden = !this.running.size;
    $("table-stop").hidden = !this.running.size;
    $("table-go").hidden = Boolean(this.running.size) || !open;
    $("table-go").lastChild.textContent = done ? `Go on with ${open}` : `Answer ${open}`;
    $("table-csv").disabled = !done;
  }

  #download() {
    const rows = this.#ordered().map((row) => [row.name, row.message.text, row.text, row.answer ? row.state : "open", row.tokens, (row.ms / 1000).toFixed(3)]);
    const csv = csvOf([["picture", "question", "answer", "state", "tokens", "seconds"], ...rows]);
    save(new Blob([csv], { type: "text/csv" }), "answers.csv");
  }

  /** Another question over the same pictures. */
  again(question) {
    return this.start(question, this.#ordered().map((row) => ({ name: row.name, image: async () => row.message.images[0] })));
  }
}

