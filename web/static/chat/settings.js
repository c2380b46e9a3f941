// How answers are to be made, kept in this browser.

import { $ } from "../shared/dom.js";
import { forgetKey } from "../shared/server.js";

const KEY = "mtmd.settings";
const PLAIN = { system: "", detail: "auto", max_tokens: 1024, temperature: 0, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, seed: null };
const AGAIN_TEMPERATURE = 0.7;
let defaults = PLAIN;
let chosen = {};
let key = KEY;
let model = null; // of several, which have their own settings
let changed = () => {};

const read = () => ({ ...defaults, ...chosen });

/** What a request carries: only what differs from the server's own defaults, and how long an answer may be. */
export function options() {
  const { detail, seed, ...rest } = read();
  const given = Object.fromEntries(Object.entries(rest).filter(([name, value]) => name === "max_tokens" || value !== PLAIN[name]));
  return { ...(model ? { model } : {}), ...given, ...(detail === "auto" ? {} : { detail }), ...(seed === null ? {} : { seed }) };
}

/** For another answer to the same question: at temperature 0 it would be the same one again. */
export function optionsForAnother() {
  const given = options();
  delete given.seed;
  return given.temperature ? given : { ...given, temperature: AGAIN_TEMPERATURE };
}

/** Of this model: what was chosen for it in this browser, before what its preset says. */
export function settingsFor(about) {
  const preset = Object.fromEntries(Object.entries(about.preset).filter(([name]) => name in PLAIN));
  defaults = { ...PLAIN, max_tokens: about.max_tokens, ...preset };
  model = about.many ? about.model : null;
  key = model ? `${KEY}.${model}` : KEY;
  $("settings-model").textContent = model ?? "";
  try {
    chosen = JSON.parse(localStorage.getItem(key) ?? "{}");
  } catch {
    chosen = {};
  }
}

/** What an answer was made with is how the next ones are. */
export function adopt(given) {
  for (const name of ["system", "detail", "temperature", "seed", "top_p", "top_k", "min_p", "repetition_penalty"]) {
    const value = given[name] ?? PLAIN[name];
    if (value === defaults[name]) delete chosen[name];
    else chosen[name] = value;
  }
  localStorage.setItem(key, JSON.stringify(chosen));
  changed();
}

export function startSettings(about, onChange) {
  changed = onChange;
  settingsFor(about);
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
    localStorage.removeItem(key);
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
  localStorage.setItem(key, JSON.stringify(chosen));
  changed();
}
