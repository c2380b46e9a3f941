// The chat page: opens conversations, sends messages, follows answers while they are written.

import { $, announce, themeButton, toast } from "../shared/dom.js";
import { ServerError, events, get, patch, post } from "../shared/server.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { Growing, answerMessage, userMessage } from "./message.js";
import { startScrolling, stayAtEnd } from "./scroll.js";
import { options, optionsForAnother, startSettings } from "./settings.js";
import { Tree } from "./tree.js";
import { startViewer } from "./viewer.js";

const TOLD = "mtmd.notice";
const NARROW = matchMedia("(max-width: 760px)");

const tree = new Tree();
let about;
let composer;
let list;
let conversation = null; // {id, title, head}
let following = null; // {id, controller, growing}
let problem = ""; // why the last message has no answer
const drawn = new Map(); // message id -> {message, key, element}: what has not changed stays as it is, an open receipt too

const act = { edit: startEdit, answer: (message) => ask(message, options()), again, show: showBranch };

async function start() {
  themeButton($("theme"));
  about = await get("/api/about");
  $("model").textContent = about.model;
  $("not-kept").hidden = about.kept;
  tell(about.notice);
  if (about.fault) toast(`The server cannot answer: ${about.fault}.`, { sticky: true });
  composer = new Composer(about, { send, where, editLast });
  list = new ConversationList({ open: (id) => go(id), gone: (id) => { if (conversation?.id === id) go(null); }, renamed: onRenamed });
  startSettings(about, () => composer.changed());
  startViewer(about.model, onRegion);
  listen();
  startScrolling();
  setSide(!NARROW.matches);
  list.refresh();
  await open(idInAddress());
}

/** What happened to the history, until this person has put it away. */
function tell(notice) {
  if (!notice || localStorage.getItem(TOLD) === notice.id) return;
  toast(notice.text, { sticky: true, closed: () => localStorage.setItem(TOLD, notice.id) });
}

function listen() {
  $("new-chat").addEventListener("click", (event) => {
    event.preventDefault();
    go(null);
  });
  $("stop").addEventListener("click", stop);
  $("cancel-edit").addEventListener("click", () => composer.stopEditing());
  $("open-side").addEventListener("click", () => setSide($("app").classList.contains("closed")));
  for (const id of ["close-side", "veil"]) $(id).addEventListener("click", () => setSide(false));
  addEventListener("popstate", () => open(idInAddress()));
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open], [popover]:popover-open")) return;
    if (following) stop();
    else if (NARROW.matches) setSide(false);
  });
}

const idInAddress = () => /^\/c\/([0-9a-f]+)$/.exec(location.pathname)?.[1] ?? null;

function setSide(open_) {
  $("app").classList.toggle("closed", !open_);
  $("app").classList.toggle("open", open_);
  $("open-side").setAttribute("aria-expanded", String(open_));
  $("side").inert = !open_;
}

async function go(id) {
  window.history.pushState(null, "", id ? `/c/${id}` : "/");
  if (NARROW.matches) setSide(false);
  await open(id);
}

async function open(id) {
  following?.controller.abort();
  following = null;
  problem = "";
  drawn.clear();
  try {
    const loaded = id ? await get(`/api/conversations/${id}`) : { conversation: null, messages: [] };
    conversation = loaded.conversation;
    tree.load(loaded.messages, conversation?.head);
  } catch (error) {
    toast(error.message);
    window.history.replaceState(null, "", "/");
    conversation = null;
    tree.load([], null);
  }
  composer.restore(conversation?.id);
  composer.setBusy(false);
  list.select(conversation?.id ?? null);
  draw();
  stayAtEnd();
  if (!matchMedia("(pointer: coarse)").matches && !document.querySelector("dialog[open]")) $("prompt").focus();
  const running = [...tree.messages.values()].find((message) => message.state === "running");
  if (running) follow(running);
}

async function reload() {
  const loaded = await get(`/api/conversations/${conversation.id}`);
  tree.load(loaded.messages, loaded.conversation.head);
  draw();
}

function draw() {
  const path = tree.path();
  $("title").textContent = conversation?.title || "New chat";
  document.title = conversation?.title ? `${conversation.title} – mtmd` : "mtmd";
  $("welcome").hidden = path.length > 0;
  $("thread").hidden = path.length === 0;
  const thread = $("thread");
  path.forEach((message, index) => {
    const element = drawMessage(message, index === path.length - 1);
    if (thread.children[index] !== element) thread.insertBefore(element, thread.children[index] ?? null);
  });
  while (thread.children.length > path.length) thread.lastChild.remove();
}

function drawMessage(message, last) {
  const running = Boolean(following);
  const unanswered = last && message.role === "user" && { running, problem };
  const key = JSON.stringify([unanswered, tree.siblings(message), following?.id === message.id]);
  const old = drawn.get(message.id);
  if (old?.message === message && old.key === key) {
    old.element.classList.toggle("last", last);
    return old.element;
  }
  const context = { tree, act, running, problem, model: about.model, last, redraw: redrawAll };
  const element = message.role === "user" ? userMessage(message, context) : answerMessage(message, context);
  if (following?.id === message.id) element.append(following.growing.progress, following.growing.plain);
  drawn.set(message.id, { message, key, element });
  return element;
}

function redrawAll() {
  drawn.clear();
  draw();
}

/** For the meter: where the draft would be put. */
function where(editing) {
  return { conversation: conversation?.id ?? null, parent: editing ? editing.parent : tree.head };
}

/** Send a message: it is acknowledged once it is on the server's disk. True where it is. */
async function send(text, images, editing) {
  composer.setBusy(true);
  try {
    if (!conversation) {
      conversation = await post("/api/conversations");
      window.history.pushState(null, "", `/c/${conversation.id}`);
    }
    const parent = editing ? editing.parent : tree.head;
    const sent = await post(`/api/conversations/${conversation.id}/messages`,
      { parent, text, images: images.map(({ sha256, name }) => ({ sha256, name })) });
    sessionStorage.removeItem("mtmd.draft.");
    composer.draftKey = `mtmd.draft.${conversation.id}`;
    conversation = sent.conversation;
    tree.put({ ...sent.message, html: null, regions: null });
    tree.head = sent.message.id;
    stayAtEnd();
    list.select(conversation.id);
    ask(sent.message, options());
    return true;
  } catch (error) {
    composer.setBusy(false);
    toast(error.message, { sticky: true });
    return false;
  }
}

async function ask(message, chosen) {
  if (following) return;
  problem = "";
  composer.setBusy(true);
  draw();
  try {
    const answer = await post(`/api/conversations/${conversation.id}/answers`, { parent: message.id, options: chosen });
    tree.put(answer);
    tree.head = answer.id;
    list.refresh();
    await follow(answer);
  } catch (error) {
    problem = error.message;
    composer.setBusy(false);
    tree.head = message.id;
    draw();
    announce(error.message);
  }
}

function again(answer) {
  const message = tree.messages.get(answer.parent);
  if (following) return toast("An answer is being written; stop it first.");
  tree.head = message.id;
  return ask(message, answer.state === "failed" ? options() : optionsForAnother());
}

/** Show an answer as it is written, from its beginning: also after a reload of the page in its midst. */
async function follow(answer) {
  const controller = new AbortController();
  const mine = { id: answer.id, controller, growing: new Growing(document.createElement("div")) };
  following = mine;
  composer.setBusy(true);
  draw();
  let ended = null;
  try {
    for await (const event of events(answer.id, controller.signal)) {
      if (event.type === "end") ended = event;
      else mine.growing.take(event);
    }
  } catch (error) {
    if (controller.signal.aborted) return;
    if (!(error instanceof ServerError) || error.code !== "ended") toast(error.message, { sticky: true });
  }
  following = null;
  composer.setBusy(false);
  if (ended?.message?.id) {
    tree.put({ ...ended.message, unsaved: ended.unsaved });
    draw();
    announce(`Answer: ${ended.message.text}`);
  } else await reload().catch((error) => toast(error.message));
  composer.changed();
  list.refresh();
}

async function stop() {
  if (!following) return;
  $("stop").disabled = true;
  try {
    await post(`/api/answers/${following.id}/stop`);
  } catch (error) {
    toast(error.message);
  }
  $("stop").disabled = false;
}

function showBranch(id) {
  if (following) {
    toast("An answer is being written; stop it first.");
    return;
  }
  tree.head = tree.lastBelow(id);
  problem = "";
  draw();
  composer.changed();
  patch(`/api/conversations/${conversation.id}`, { head: tree.head }).catch((error) => toast(error.message));
}

function startEdit(message) {
  if (following) toast("An answer is being written; stop it first.");
  else composer.edit(message);
}

function editLast() {
  const last = tree.path().findLast((message) => message.role === "user");
  if (last && !following) composer.edit(last);
}

function onRenamed(changed) {
  if (conversation?.id !== changed.id) return;
  conversation = changed;
  $("title").textContent = changed.title;
  document.title = `${changed.title} – mtmd`;
}

function onRegion(item, box, blob) {
  const numbers = box.map((share) => Math.round(share * 1000)).join(", ");
  composer.attachBlob(blob, `region of ${item.title}`);
  composer.insert(`In the region [${numbers}] of picture ${item.number} (0–1000; attached as a picture too): `);
}

start().catch((error) => toast(error.message, { sticky: true }));
