// Everything asked of the server: JSON, files, pictures, and the events of an answer. Asks for a key where the server wants one.

import { $ } from "./dom.js";

const ROOT = new URL("../../../", import.meta.url).pathname; // a proxy may have put all of it under a path
const KEY = "mtmd.key";
const SILENCE_MS = 25_000; // the server gives a sign of life every ten seconds
const LOOK_MS = 4000; // at most, until it is asked again whether a model has been fetched
const RETRY_MS = [300, 700, 1500, 3000, 5000];

/** The address of a path of the server, which begins with a slash. */
export const at = (path) => ROOT + path.slice(1);

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let asking = null;

/** One dialog, however many requests wait for it. `refused`: the key that the server did not take, if there was one. */
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    $("key-wrong").hidden = !refused;
    $("key-input").value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      if ($("key-input").value) localStorage.setItem(KEY, $("key-input").value);
      resolve(dialog.returnValue === "ok" && Boolean($("key-input").value));
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

/** Begin anew as somebody else: nothing of who was here stays in this browser but how the page looks. */
export function forgetKey() {
  const theme = localStorage.getItem("mtmd.theme");
  localStorage.clear();
  sessionStorage.clear();
  if (theme !== null) localStorage.setItem("mtmd.theme", theme);
  window.location.assign(ROOT);
}

const hasKey = () => Boolean(localStorage.getItem(KEY));

/** `options.patient`: waits, too, until a model is here that is being fetched; how far that is shows elsewhere. */
async function call(path, options = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const headers = new Headers(options.headers);
    const key = localStorage.getItem(KEY);
    if (key) headers.set("Authorization", `Bearer ${key}`);
    let response;
    try {
      response = await fetch(at(path), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached. Is it still running?", 0, "unreachable");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      const changed = localStorage.getItem(KEY) !== key; // by another request, while this one was on its way
      if (changed || await askForKey(key)) continue;
    }
    const body = await response.json().catch(() => null);
    const problem = body?.error ?? { message: `The server answered ${response.status}.` };
    if (response.status === 429 && problem.code === "rate_limit_exceeded" && attempt < 3) {
      await sleep(1000 * Number(response.headers.get("Retry-After") ?? 1));
      continue;
    }
    if (options.patient && problem.code === "model_loading") {
      await sleep(Math.min(1000 * Number(response.headers.get("Retry-After") ?? 1), LOOK_MS), options.signal);
      continue;
    }
    throw new ServerError(sentence(problem.message), response.status, problem.code);
  }
}

const sleep = (ms, signal) => new Promise((resolve) => {
  setTimeout(resolve, ms);
  signal?.addEventListener("abort", resolve, { once: true });
});
/** With a capital and a full stop. */
export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

export const get = async (path, options) => (await call(path, options)).json();
export const getText = async (path) => (await call(path)).text();
const send = async (method, path, body = {}, options = {}) =>
  (await call(path, { ...options, method, body: JSON.stringify(body), headers: { "Content-Type": "application/json" } })).json();
export const post = (path, body, options) => send("POST", path, body, options);
export const patch = (path, body) => send("PATCH", path, body);
export const remove = (path, options) => send("DELETE", path, {}, options);

export const upload = async (blob, name) =>
  (await call(`/api/images?name=${encodeURIComponent(name)}`, { method: "POST", body: blob, headers: { "Content-Type": "application/octet-stream" } })).json();

/** The pages of a PDF as pictures: {images, pages}. */
export const uploadPages = async (blob, name) =>
  (await call(`/api/pages?name=${encodeURIComponent(name)}`, { method: "POST", body: blob, headers: { "Content-Type": "application/octet-stream" } })).json();

/** Save what the server makes under the name it gives; a plain link would not carry the key. */
export async function download(path) {
  const response = await call(path);
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "export.json";
  save(await response.blob(), name);
}

/** As a file of the one who looks at the page. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

const blobs = new Map();

/** The address of a picture for an <img>. With a key it has to be fetched first: an <img> cannot carry one. */
export async function pictureUrl(path) {
  if (!hasKey()) return at(path);
  if (!blobs.has(path)) {
    blobs.set(path, call(path).then((r) => r.blob()).then((b) => URL.createObjectURL(b)));
    if (blobs.size > 200) {
      const [oldest, url] = blobs.entries().next().value;
      blobs.delete(oldest);
      url.then(URL.revokeObjectURL, () => {});
    }
  }
  try {
    return await blobs.get(path);
  } catch (error) {
    blobs.delete(path);
    throw error;
  }
}

/** The bytes of a file that the server keeps. */
export const bytesOf = (path) => call(path).then((response) => response.arrayBuffer());

export const imagePath = (sha256) => `/api/images/${sha256}`;
export const smallPath = (sha256) => `/api/images/${sha256}/small`;

export function show(img, path) {
  pictureUrl(path).then((url) => { img.src = url; }, () => { img.alt = `${img.alt} (gone)`; });
  return img;
}

/** Events of an answer to its end, over broken connections: after each break it goes on behind the last event that came, and
 * tries until `signal` ends it. `connected(whether)` is told of each break and of each connection. */
export async function* events(answer, signal, connected = () => {}) {
  let last = 0;
  let failures = 0;
  for (;;) {
    try {
      const response = await call(`/api/answers/${answer}/events`, { signal, headers: { "Last-Event-ID": String(last) } });
      connected(true);
      for await (const event of parse(response.body)) {
        failures = 0;
        if (event.id) last = event.id;
        yield event.data;
        if (event.data.type === "end") return;
      }
    } catch (error) {
      const passes = error.status === 0 || error.status === 502 || error.status === 504 || error.code === "server_busy" || !(error instanceof ServerError);
      if (signal.aborted || !passes) throw error;
    }
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    connected(false);
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)], signal);
    failures += 1;
  }
}

/** Until the time is over, the network is back, or `signal` ends it. */
function pause(ms, signal) {
  return new Promise((resolve) => {
    const ended = new AbortController();
    const end = () => {
      clearTimeout(timer);
      ended.abort();
      resolve();
    };
    const timer = setTimeout(end, ms);
    addEventListener("online", end, { signal: ended.signal });
    signal.addEventListener("abort", end, { signal: ended.signal });
  });
}

/** What a reader has next; an error where nothing comes for so long that the connection must be gone. */
async function next(reader) {
  let timer;
  const silence = new Promise((_, reject) => { timer = setTimeout(() => reject(new TypeError("the connection is silent")), SILENCE_MS); });
  try {
    return await Promise.race([reader.read(), silence]);
  } finally {
    clearTimeout(timer);
  }
}

async function* parse(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = []; // pieces of an event that is not whole yet
  let broken = false; // between the two line ends after it
  try {
    for (;;) {
      const { done, value } = await next(reader);
      if (done) return;
      if (!value.includes("\n\n") && !(broken && value.startsWith("\n"))) {
        if (value) broken = value.endsWith("\n");
        rest.push(value);
        continue;
      }
      const blocks = (rest.join("") + value).split("\n\n");
      rest = [blocks.pop()];
      broken = rest[0].endsWith("\n");
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").filter((l) => !l.startsWith(":")).map((l) => [l.slice(0, l.indexOf(":")), l.slice(l.indexOf(":") + 1).trim()]));
        if (fields.data) yield { id: Number(fields.id), data: JSON.parse(fields.data) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
