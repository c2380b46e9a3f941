// Several models behind one server: which is asked, which are in memory, load and unload.

import { $, announce, el, icon, toast } from "../shared/dom.js";
import { get, post } from "../shared/server.js";

const KEY = "mtmd.model";
const BUSY_MS = 700;
const QUIET_MS = 15_000;
const IN_WORDS = { unloaded: "", loading: "Loading", loaded: "In memory", unloading: "Unloads when nobody uses it", failed: "Cannot be loaded" };
const ROOM = { fits: "Fits into memory", swap: "Fits when another is unloaded", "too large": "Needs more memory than is available" };

/** 9.9 MB, as sizes of files are told. */
export function size(bytes) {
  let [value, unit] = [bytes, 0];
  while (value >= 999.5) [value, unit] = [value / 1000, unit + 1];
  return `${value.toLocaleString("en", { maximumFractionDigits: unit && value < 99.5 ? 1 : 0 })} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
}

export class Picker {
  /** `changed(about)`: another model was chosen, or more is known of it. */
  constructor(changed) {
    this.changed = changed;
    this.models = [];
    this.chosen = null;
    this.waits = new Set(); // elements that show how far the model is, for those who wait for it
  }

  /** What the server says of the model that was chosen last in this browser, or of its own choice. */
  async start(about) {
    $("model-open").hidden = false;
    $("model").hidden = true;
    $("model-open").addEventListener("click", () => {
      $("models").showModal();
      this.refresh();
    });
    $("models-add").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#add($("models-name").value.trim());
    });
    $("models").addEventListener("click", (event) => { if (event.target === $("models")) $("models").close(); });
    this.chosen = about.model;
    await this.refresh();
    const last = localStorage.getItem(KEY);
    const there = this.models.find((model) => model.name === last);
    if (!there || last === about.model) return about;
    this.chosen = last;
    this.#drawButton();
    return get(`/api/about?model=${encodeURIComponent(last)}`);
  }

  /** Of those that can be asked, the ones in memory first. */
  get names() {
    const able = this.models.filter((model) => model.state !== "failed" && model.room !== "too large");
    return able.sort((a, b) => (b.state === "loaded") - (a.state === "loaded")).map((model) => model.name);
  }

  #one(name = this.chosen) {
    return this.models.find((model) => model.name === name);
  }

  /** Whether it is in memory. */
  isReady(name = this.chosen) {
    return this.#one(name)?.state === "loaded";
  }

  async choose(name) {
    if (!this.#one(name)) return;
    try {
      const about = await get(`/api/about?model=${encodeURIComponent(name)}`);
      this.chosen = name;
      localStorage.setItem(KEY, name);
      this.#draw();
      this.changed(about);
      announce(`${name} is asked from now on`);
    } catch (error) {
      toast(error.message);
    }
  }

  async refresh() {
    clearTimeout(this.timer);
    try {
      const before = this.#one();
      const { models, memory, may_add } = await get("/api/models");
      $("models-add").hidden = !may_add;
      [this.models, this.memory] = [models.sort((a, b) => (a.state === "failed") - (b.state === "failed")), memory];
      this.#draw();
      const now = this.#one();
      const learnt = before && now && (before.state !== now.state || before.context !== now.context);
      if (learnt && now.state !== "loading") this.changed(await get(`/api/about?model=${encodeURIComponent(now.name)}`));
    } catch { /* the next time */ }
    for (const wait of this.waits) if (!wait.isConnected && wait.seen) this.waits.delete(wait);
    const busy = this.waits.size || $("models").open || this.models.some((model) => model.state === "loading" || model.state === "unloading");
    this.timer = setTimeout(() => this.refresh(), document.hidden ? QUIET_MS : busy ? BUSY_MS : QUIET_MS);
  }

  /** How far a model is, for one who waits for its answer. */
  waiting(name) {
    const words = el("span", {});
    const bar = el("progress", { "aria-label": `Loading ${name}`, max: 1, hidden: true });
    const element = el("div", { class: "progress" }, el("span", { class: "dot" }), words, bar);
    element.draw = () => {
      const model = this.#one(name);
      const loading = model?.state === "loading";
      words.textContent = loading ? `Loading ${name}: ${model.stage}` : model?.state === "loaded" ? "Reading" : `Waiting for ${name}`;
      [bar.hidden, bar.value] = [!loading, model?.progress ?? 0];
      element.seen ||= element.isConnected;
    };
    element.draw();
    this.waits.add(element);
    this.refresh();
    return element;
  }

  #drawButton() {
    const model = this.#one();
    $("model-open").replaceChildren(el("span", { class: `model-dot ${model?.state ?? ""}` }), el("span", {}, this.chosen), icon("left"));
    $("model-open").setAttribute("aria-label", `Model: ${this.chosen}, ${(IN_WORDS[model?.state] || "not in memory").toLowerCase()}. Choose another`);
  }

  #draw() {
    this.#drawButton();
    for (const wait of this.waits) wait.draw();
    if (!$("models").open) return;
    this.#drawMemory();
    const told = JSON.stringify([this.models, this.chosen]);
    if (told === this.told) return;
    this.told = told;
    const focused = document.activeElement?.closest?.(".model-row")?.dataset.name;
    const action = document.activeElement?.classList.contains("button");
    $("models-list").replaceChildren(...this.models.map((model) => this.#row(model)));
    const row = [...$("models-list").children].find((one) => one.dataset.name === focused);
    (row?.querySelector(action ? ".button" : ".model-pick") ?? row?.querySelector(".model-pick"))?.focus();
  }

  /** Of the memory that is short: where there is a GPU, its own. */
  #drawMemory() {
    const spaces = Object.entries(this.memory ?? {}).sort(([a], [b]) => (a === "cpu") - (b === "cpu"));
    $("models-memory").replaceChildren(...spaces.slice(0, 1).map(([space, { limit, taken, free }]) => el("div", {},
      el("span", {}, `Models take ${size(taken)} of ${size(limit)} of ${space === "cpu" ? "memory" : `the memory of ${space}`}, as predicted; ${size(free)} are free now`),
      el("meter", { min: 0, max: limit, value: Math.min(taken, limit), high: limit * 0.9, "aria-label": "Memory used by models" }))));
  }

  #row(model) {
    const { name, state, progress, stage, reason } = model;
    const facts = [model.kind, model.file_bytes === null ? "not fetched yet" : `${size(model.file_bytes)} on disk`,
      model.memory_bytes ? `needs ${size(model.memory_bytes)} of memory` : null, model.context ? `context ${model.context.toLocaleString("en")}` : null,
      model.vision === false ? "text only" : null].filter(Boolean).join(" · ");
    const words = state === "loading" ? `Loading: ${stage}${progress < 1 ? `, ${Math.round(progress * 100)} %` : ""}` : state === "failed" ? `Cannot be loaded: ${reason}` : IN_WORDS[state] || ROOM[model.room] || "";
    const tight = model.room === "too large" || model.room === "swap";
    const pick = el("button", { class: "model-pick", type: "button", "aria-pressed": String(name === this.chosen), on: { click: async () => {
      await this.choose(name);
      $("models").close();
    } } }, el("span", { class: `model-dot ${state}` }), el("span", { class: "model-name" }, name), el("span", { class: "model-facts" }, facts),
    words ? el("span", { class: `model-state ${state}${tight ? " tight" : ""}`, title: reason || null }, words) : null);
    const there = state === "loaded";
    const [word, label] = there ? ["Unload", "Unload"] : state === "failed" ? ["Try again", "Try again to load"] : model.file_bytes === null ? ["Fetch", "Fetch and load"] : ["Load", "Load"];
    const button = state === "loading" || state === "unloading" ? null : el("button", { class: "button", type: "button", "aria-label": `${label} ${name}`,
      on: { click: () => this.#act(there ? "unload" : "load", name) } }, word);
    return el("li", { class: `model-row${name === this.chosen ? " chosen" : ""}`, dataset: { name } }, pick, button,
      state === "loading" ? el("progress", { max: 1, value: progress, "aria-label": `Loading ${name}` }) : null);
  }

  /** Has the server look for a model on the hub, and fetch it; its row shows how far that is. */
  async #add(name) {
    const [button, problem] = [$("models-add").querySelector("button"), $("models-problem")];
    [button.disabled, problem.hidden] = [true, true];
    try {
      await post("/models/add", { model: name });
      $("models-name").value = "";
      announce(`${name} is added`);
      await this.refresh();
      [...$("models-list").children].find((row) => row.dataset.name === name)?.scrollIntoView({ block: "nearest" });
    } catch (error) {
      [problem.textContent, problem.hidden] = [error.message, false];
    }
    button.disabled = false;
  }

  async #act(what, name) {
    try {
      await post(`/models/${what}`, { model: name });
      announce(what === "load" ? `Loading ${name}` : `Unloading ${name}`);
    } catch (error) {
      toast(error.message);
    }
    this.refresh();
  }
}
