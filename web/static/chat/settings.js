// How answers are to be made, kept in this browser.

import { $ } from "../shared/dom.js";
import { forgetKey } from "../shared/server.js";

const KEY = "mtmd.settings";
const PLAIN = { system: "", detail: "auto", max_tokens: 1024, temperature: 0, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, seed: null };
const AGAIN_TEMPERATURE = 0.7;
let defaults = PLAIN;
let chosen = {};
let changed = () => {};

const read = () => ({ ...defaults, ...chosen });

/** What a request carries: only what differs from the server's own defaults, and how long an answer may be. */
export function options() {
  const { detail, seed, ...rest } = read();
  const given = Object.fromEntries(Object.entries(rest).filter(([name, value]) => name === "max_tokens" || value !== PLAIN[name]));
  return { ...given, ...(detail === "auto" ? {} : { detail }), ...(seed === null ? {} : { seed }) };
}

/** For another answer to the same question: at temperature 0 it would be the same one again. */
export function optionsForAnother() {
  const given = options();
  delete given.seed;
  return given.temperature ? given : { ...given, temperature: AGAIN_TEMPERATURE };
}

export function startSettings(about, onChange) {
  defaults = { ...PLAIN, max_tokens: about.max_tokens };
  changed = onChange;
  try {
    chosen = JSON.parse(localStorage.getItem(KEY) ?? "{}");
  } catch {
    chosen = {};
  }
  const form = $("settings-form");
  $("signed-in").hidden = about.key === null;
  $("key-name").textContent = about.key ?? "";
  $("other-key").addEventListener("click", forgetKey);
  $("open-settings").addEventListener("click", () => {
    fill(form);
    $("settings").showModal();
  });
  form.addEventListener("change", () => { if (form.checkValidity()) keep(form); });
  form.addEventListener("input", (event) => { if (event.target.name === "system") keep(form); });
  $("settings-reset").addEventListener("click", () => {
    chosen = {};
    localStorage.removeItem(KEY);
    fill(form);
    changed();
  });
  $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
}

function fill(form) {
  for (const [name, value] of Object.entries(read())) form.elements[name].value = value ?? "";
}

function keep(form) {
  chosen = {};
  for (const [name, usual] of Object.entries(defaults)) {
    const text = form.elements[name].value;
    const value = name === "system" || name === "detail" ? text : text === "" ? null : Number(text);
    if (value !== usual) chosen[name] = value;
  }
  localStorage.setItem(KEY, JSON.stringify(chosen));
  changed();
}
