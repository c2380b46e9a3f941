// How answers are to be made, kept in this browser.

import { $, el } from "../shared/dom.js";
import { forgetKey } from "../shared/server.js";

const KEY = "mtmd.settings";
const PLAIN = { system: "", detail: "auto", max_tokens: null, temperature: 0, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, seed: null, think: "auto", think_budget: null, adapter: "", no_sound: false, stop: "", json_schema: "" };
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
const TEXTS = ["system", "detail", "think", "adapter", "stop", "json_schema"];
const FLAGS = ["no_sound"];
const AGAIN_TEMPERATURE = 0.7;
let defaults = PLAIN;
let chosen = {};
let key = KEY;
let model = null; // of several, which have their own settings
let changed = () => {};
let adapters = []; // of this model

/** All settings as they are in force; null where the model decides, which was not opened yet. */
export const read = () => ({ ...defaults, ...chosen });

/** What a request carries: the system prompt, and what was chosen here. All else the server knows. */
export function options() {
  const given = Object.entries(chosen).filter(([name, value]) => name in PLAIN && value !== null && value !== defaults[name]);
  const { system, stop } = read();
  const lines = stop.split("\n").filter(Boolean);
  return { ...(model ? { model } : {}), ...Object.fromEntries(given), ...(system ? { system } : {}), ...(lines.length ? { stop: lines } : {}) };
}

/** For another answer to the same question: at temperature 0 it would be the same one again. */
export function optionsForAnother() {
  const given = options();
  delete given.seed;
  return read().temperature === 0 ? { ...given, temperature: AGAIN_TEMPERATURE } : given;
}

/** Of this model: what was chosen for it in this browser, before what its preset and its own files say. */
export function settingsFor(about) {
  const preset = Object.fromEntries(Object.entries(about.preset).filter(([name]) => name in PLAIN));
  defaults = { ...PLAIN, ...own(about), ...preset };
  defaults.think = { true: "on", false: "off", none: "off" }[defaults.think] ?? defaults.think ?? "auto";
  adapters = about.adapters;
  if (!adapters.includes(defaults.adapter)) defaults.adapter = "";
  $("settings-source").textContent = source(about, preset);
  $("thinking-settings").hidden = about.thinks === false;
  $("sound-settings").hidden = !about.video_sound;
  model = about.many ? about.model : null;
  key = model ? `${KEY}.${model}` : KEY;
  $("settings-model").textContent = model ?? "";
  try {
    chosen = JSON.parse(localStorage.getItem(key) ?? "{}");
  } catch {
    chosen = {};
  }
  if (!chosen.think) delete chosen.think;
  showAdapter();
}

/** The menu of adapters, where there are any, which stands beside the model's name. */
function showAdapter() {
  if (chosen.adapter && !adapters.includes(chosen.adapter)) delete chosen.adapter; // one of before
  const menu = $("adapter");
  menu.hidden = !adapters.length;
  menu.replaceChildren(...["", ...adapters].map((name) => el("option", { value: name }, name || "no adapter")));
  menu.value = read().adapter;
}

/** By the model's own files, as far as the preset lets them. */
function own({ preset, sampling }) {
  if (!sampling) return Object.fromEntries(SAMPLING.map((name) => [name, null]));
  const { temperature, ...rest } = sampling.values;
  return preset.sampling === "off" ? {} : preset.sampling === "greedy" || temperature === undefined ? rest : { temperature, ...rest };
}

/** Which defaults are in force, and where they come from. */
function source(about, preset) {
  const words = (values) => SAMPLING.filter((name) => name in values).map((name) => `${name.replace("_", " ")} ${values[name]}`).join(", ");
  if (!about.sampling) return "The defaults are the model's own; they are shown when it is loaded.";
  const model = words(own(about));
  const parts = [words(preset) && `${words(preset)} (preset)`, model && `${model} (${about.sampling.source})`].filter(Boolean);
  const unused = about.sampling.unused.length ? ` Not applied: ${about.sampling.unused.join(", ")}.` : "";
  return `Defaults: ${parts.join("; ") || "the most probable token; the model's files recommend no sampling"}.${unused}`;
}

/** What an answer was made with is how the next ones are. */
export function adopt(given) {
  for (const name of ["system", "detail", "temperature", "seed", "top_p", "top_k", "min_p", "repetition_penalty", "think", "think_budget", "adapter", "no_sound", "stop", "json_schema"]) {
    const value = (name === "stop" ? given.stop?.join("\n") : given[name]) ?? (name === "system" ? "" : defaults[name]);
    if (value === defaults[name]) delete chosen[name];
    else chosen[name] = value;
  }
  showAdapter();
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
  $("adapter").addEventListener("change", () => {
    fill(form, $("adapter").value);
    keep(form);
  });
  form.addEventListener("input", (event) => { if (event.target.name === "system") keep(form); });
  $("settings-reset").addEventListener("click", () => {
    chosen = {};
    localStorage.removeItem(key);
    fill(form);
    changed();
  });
  $("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
}

/** Which schemas can be followed, the server knows; what is no JSON at all is told here, and not used. */
function schemaProblem(text) {
  try {
    if (text.trim()) JSON.parse(text);
    return "";
  } catch (problem) {
    return `Not used, as it is no JSON: ${problem.message}`;
  }
}

function fill(form, adapter = read().adapter) {
  for (const [name, value] of Object.entries({ ...read(), adapter })) form.elements[name].value = value ?? "";
  $("schema-problem").textContent = "";
}

function keep(form) {
  chosen = {};
  $("schema-problem").textContent = schemaProblem(form.elements.json_schema.value);
  for (const [name, usual] of Object.entries(defaults)) {
    const text = name === "json_schema" && $("schema-problem").textContent ? usual : form.elements[name].value;
    const value = TEXTS.includes(name) ? text : FLAGS.includes(name) ? text === "true" : text === "" ? usual : Number(text);
    if (value !== usual) chosen[name] = value;
  }
  localStorage.setItem(key, JSON.stringify(chosen));
  changed();
}
