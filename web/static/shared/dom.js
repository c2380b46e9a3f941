// Elements, announcements to screen readers, notices, the theme button.

export const $ = (id) => document.getElementById(id);

/** An element: properties that the element has are set, others become attributes; children are nodes or text. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    else if (name === "class") made.className = value;
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

export function iconButton(name, label, run, title = label) {
  return el("button", { class: "icon-button", type: "button", "aria-label": label, title, on: { click: run } }, icon(name));
}

/** Said to screen readers, seen by nobody. */
export function announce(text) {
  $("live").textContent = "";
  requestAnimationFrame(() => { $("live").textContent = text; });
}

const SHOWN_MS = 5000; // before anybody has begun to read a notice,
const CHARACTER_MS = 70; // and for each of its characters: a slow reader's pace

/** A notice that goes away by itself, or with `sticky` when it is closed; `closed` is then called. It stays as long as it takes to read
 * it, and while a pointer or the focus is on it; one with `ms` goes after that time, whatever happens. `action`: {label, run}, a button in it.
 * One with a `group` takes those of it that are still there with it, a line for each. Gives a function that takes it away. */
export function toast(text, { sticky = false, closed = () => {}, action = null, ms = null, group = null } = {}) {
  const before = group && [...$("toasts").children].find((old) => old.dataset.group === group);
  const lines = before ? [...new Set([...before.firstChild.textContent.split("\n"), text])] : [text];
  text = lines.join("\n");
  before?.remove();
  for (const old of [...$("toasts").children]) if (old.firstChild.textContent === text) old.remove(); // once is enough
  const put = action && el("button", { class: "toast-action", type: "button", on: { click: () => {
    made.remove();
    action.run();
  } } }, action.label);
  const made = el("div", { class: "toast", dataset: group && { group } }, el("span", {}, text), put, iconButton("close", "Dismiss", () => {
    made.remove();
    closed();
  }));
  $("toasts").append(made);
  while ($("toasts").children.length > 3) $("toasts").firstChild.remove();
  if (ms) setTimeout(() => made.remove(), ms);
  else if (!sticky) removeOnceRead(made, SHOWN_MS + CHARACTER_MS * text.length);
  return () => made.remove();
}

function removeOnceRead(notice, ms) {
  let timer;
  const wait = () => {
    clearTimeout(timer);
    timer = setTimeout(() => { if (!notice.matches(":hover, :focus-within")) notice.remove(); }, ms);
  };
  for (const kind of ["pointerleave", "focusout"]) notice.addEventListener(kind, wait);
  wait();
}

/** navigator.clipboard is there on https and localhost only. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text, class: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce("Copied");
}

/** The theme button of every page: system, light, dark in turn. */
export function themeButton(button) {
  const order = ["", "light", "dark"];
  const names = { "": "as the system", light: "light", dark: "dark" };
  const label = () => { button.title = `Theme: ${names[localStorage.getItem("mtmd.theme") ?? ""]}`; button.setAttribute("aria-label", button.title); };
  button.addEventListener("click", () => {
    const next = order[(order.indexOf(localStorage.getItem("mtmd.theme") ?? "") + 1) % order.length];
    localStorage.setItem("mtmd.theme", next);
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    label();
    announce(button.title);
  });
  label();
}
