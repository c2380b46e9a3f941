// The same message answered twice, side by side: by two models, or with two settings.

import { $, el, toast } from "../shared/dom.js";
import { events, post } from "../shared/server.js";
import { Growing } from "../chat/message.js";
import { settingsOf } from "../chat/receipt.js";
import { read } from "../chat/settings.js";

const KEY = "mtmd.compare";
const SIDES = ["a", "b"];
const ANOTHER_TEMPERATURE = 0.7;
const SYSTEM_SHOWN = 24; // characters

/** What is to be compared, chosen in a dialog, kept for this tab. */
export class Comparing {
  /** `options()`: as a message is asked now; `models()`: names, none where there is but one; `changed()`. */
  constructor({ options, models, changed }) {
    Object.assign(this, { options, models, changed });
    this.chosen = JSON.parse(sessionStorage.getItem(KEY) ?? "null"); // [{model, temperature, seed, detail, system}, ...], null where nothing is compared
    $("compare-open").addEventListener("click", () => this.#ask());
    $("compare").addEventListener("close", () => {
      if ($("compare").returnValue === "on") this.#keep();
      else if ($("compare").returnValue === "off") this.stop();
    });
    this.#draw();
  }

  get on() {
    return this.chosen !== null;
  }

  stop() {
    this.chosen = null;
    sessionStorage.removeItem(KEY);
    this.#draw();
    this.changed();
  }

  /** Options of both answers. */
  sides() {
    const several = this.models().length > 0;
    return this.chosen.map((side) => {
      const { model, temperature, seed, detail, system, ...rest } = { ...this.options(), ...side };
      return { ...rest, ...(model && several ? { model } : {}), ...(temperature === null || temperature === undefined ? {} : { temperature }), ...(seed === null || seed === undefined ? {} : { seed }),
        ...(detail && detail !== "auto" ? { detail } : {}), ...(system ? { system } : {}) };
    });
  }

  #ask() {
    const form = $("compare-form");
    const names = this.models();
    for (const label of form.querySelectorAll(".many-only")) label.hidden = names.length === 0;
    const now = { ...read(), ...this.options() };
    const other = names.find((name) => name !== now.model);
    const sides = this.chosen ?? [now, other ? { ...now, model: other } : { ...now, temperature: now.temperature ? 0 : ANOTHER_TEMPERATURE }];
    SIDES.forEach((side, index) => {
      const select = form.elements[`model-${side}`];
      select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
      for (const name of ["model", "temperature", "seed", "detail", "system"]) form.elements[`${name}-${side}`].value = sides[index][name] ?? "";
      select.value = names.includes(sides[index].model) ? sides[index].model : names[index] ?? names[0] ?? "";
    });
    $("compare-off").hidden = !this.on;
    $("compare").returnValue = "";
    $("compare").showModal();
  }

  #keep() {
    const { elements } = $("compare-form");
    this.chosen = SIDES.map((side) => {
      const seed = elements[`seed-${side}`].value;
      return { model: elements[`model-${side}`].value || null, temperature: number(elements[`temperature-${side}`].value), seed: number(seed),
        detail: elements[`detail-${side}`].value, system: elements[`system-${side}`].value };
    });
    sessionStorage.setItem(KEY, JSON.stringify(this.chosen));
    this.#draw();
    this.changed();
    $("prompt").focus();
  }

  #draw() {
    $("comparing").hidden = !this.on;
    if (!this.on) return;
    const named = differences(...this.sides()).map((words) => el("b", {}, words));
    $("comparing").replaceChildren(el("span", {}, "Comparing ", named[0], " with ", named[1]),
      el("button", { class: "link", type: "button", on: { click: () => this.#ask() } }, "Change"),
      el("button", { class: "link", type: "button", on: { click: () => this.stop() } }, "Stop comparing"));
  }
}

const number = (text) => (text === "" ? null : Number(text));

/** What each has that the other has not, in words. */
function differences(left, right) {
  const words = (side) => [side.model, side.temperature === undefined ? "its own temperature" : `temperature ${side.temperature}`, side.seed === undefined ? "any seed" : `seed ${side.seed}`,
    `${side.detail ?? "auto"} detail`, side.system ? `“${side.system.slice(0, SYSTEM_SHOWN)}${side.system.length > SYSTEM_SHOWN ? "…" : ""}”` : "no system prompt"];
  const [one, other] = [words(left), words(right)];
  const apart = (own, others) => own.filter((word, index) => word && word !== others[index]).join(" · ") || own[0] || "the same settings";
  return [apart(one, other), apart(other, one)];
}

/** Two answers to one message while they are written. */
export class SideBySide {
  /** `parts`: [{options, answer | null}], an answer that is being written already; `waiting(options)`: an element that tells how far its model is, or null. */
  constructor(conversation, parent, parts, waiting) {
    Object.assign(this, { conversation, parent });
    this.controller = new AbortController();
    this.parts = parts.map(({ options, answer = null }, side) => {
      const growing = new Growing();
      const pending = answer ? null : waiting(options);
      if (pending) growing.progress.hidden = true;
      const column = el("article", { class: "message answer", "aria-label": side ? "Right answer" : "Left answer" },
        el("p", { class: "settings-of" }, settingsOf(null, options)), pending, growing.elements);
      return { options, answer, side, growing, pending, column, error: "", ended: null };
    });
    this.element = el("div", { class: "compare", role: "group", "aria-label": "Answers side by side" },
      el("div", { class: "columns two" }, this.parts.map((part) => part.column)));
  }

  /** The answers at their ends, as far as there are any. */
  async run() {
    await Promise.all(this.parts.map((part) => this.#write(part)));
    return this.parts.map((part) => part.ended ?? part.answer).filter(Boolean);
  }

  async #write(part) {
    const { signal } = this.controller;
    try {
      part.answer ??= await post(`/api/conversations/${this.conversation}/answers`, { parent: this.parent, options: part.options, side: part.side }, { signal, patient: true });
      if (part.pending) part.pending.remove();
      part.growing.progress.hidden = false;
      for await (const event of events(part.answer.id, signal, (whether) => part.growing.connected(whether))) {
        if (event.type === "end") part.ended = { ...event.message, unsaved: event.unsaved };
        else part.growing.take(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      part.error = error.message;
      part.pending?.remove();
      part.growing.progress.hidden = true;
      part.column.append(el("div", { class: "problem" }, error.message));
    }
  }

  get errors() {
    return this.parts.filter((part) => part.error).map((part) => `${settingsOf(null, part.options)}: ${part.error}`);
  }

  /** Those being written are ended, those not begun are given up. */
  async stop() {
    const begun = this.parts.filter((part) => part.answer && !part.ended);
    await Promise.all(begun.map((part) => post(`/api/answers/${part.answer.id}/stop`).catch((error) => toast(error.message))));
    if (this.parts.some((part) => !part.answer)) this.controller.abort();
  }
}
