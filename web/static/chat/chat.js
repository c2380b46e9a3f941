// The chat page: opens conversations, sends messages, follows answers while they are written.

import { $, announce, el, themeButton, toast } from "../shared/dom.js";
import { ignoreComposing } from "../shared/keys.js";
import { ServerError, at, events, get, patch, post, upload } from "../shared/server.js";
import { Comparing, SideBySide } from "../compare/compare.js";
import { Picker } from "../models/picker.js";
import { Composer, asSent } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { Growing, answerMessage, sideBySide, userMessage } from "./message.js";
import { listenToOthers, tellOthers } from "./other_windows.js";
import { leaveEnd, startScrolling, stayAtEnd } from "./scroll.js";
import { adopt, options, optionsForAnother, settingsFor, startSettings } from "./settings.js";
import { Tree } from "./tree.js";
import { startVideos } from "./video.js";
import { setModel, startViewer } from "./viewer.js";
import { ThreadWindow } from "./window.js";
import { startWelcome } from "./welcome.js";
import { AnswerText } from "../markdown/view.js";
import { Table, rowsOf } from "../table/table.js";

const FOUND_MS = 2500;
const MARKS_MAX = 200;
const SIDES = 4; // an answer that was asked for alone stands behind those
const ROOM = 0.6; // of the context, for what is left of a conversation of which turns were dropped
const TOLD = "mtmd.notice";
const NARROW = matchMedia("(max-width: 760px)");

const tree = new Tree();
let about;
let composer;
let list;
let conversation = null; // {id, title, head}
let shown; // the part of the branch that is on the page
let table;
let seen = null; // the first message that the model sees, as it is drawn
let since = null; // the first message of a draft that the model is to see, where older ones were dropped for it
let row = null; // the message of a table that is shown as a conversation
let following = null; // {id, controller, growing}, or {both, controller} where two answers are written
let asked = null; // {id, controller, element}: the message that an answer is asked for, until the server has begun one
let picker = null; // of several models
let comparing;
let problem = ""; // why the last message has no answer
let unsure = null; // {conversation, parent, text, images}: a message that may have arrived, for the server went while it was sent
let opened = Promise.resolve(); // of the conversation that is to be shown, when it is
let opening = 0; // which of those that were to be shown is the last
let missed = false; // another window has changed this conversation while an answer was followed here
let unsureAnswer = null; // the message that an answer was asked for when the server went
const views = new Map(); // id of an answer -> what draws its text, with what somebody has opened or selected in it
const drawn = new Map(); // message id -> {message, key, element}: what has not changed stays as it is, an open receipt too

const compared = new Set(); // messages whose answers are shown side by side
const act = { edit: startEdit, answer, again, goOn, goOnWithRoom, goOnWith, look, show: showBranch, compare };

async function start() {
  ignoreComposing();
  // relative ones would mean something else in the addresses of conversations
  for (const link of document.querySelectorAll('a[href]:not([href^="#"]), link[rel="icon"]')) link.href = link.href;
  themeButton($("theme"));
  about = await get("/api/about");
  if (about.many) {
    picker = new Picker(onModel);
    about = await picker.start(about);
  }
  $("model").textContent = about.model;
  $("not-kept").hidden = about.kept;
  tell(about.notice);
  if (about.shared) toast("Another server uses the same history. An answer that one of them is writing looks cut off in the other.", { sticky: true });
  if (about.fault) toast(`The server cannot answer: ${about.fault}.`, { sticky: true });
  composer = new Composer(about, { ready: () => !picker || picker.isReady(), opened: () => opened, send, where, editLast, anew: () => go(null), askOver: (files) => table.ask(files), dropOldest });
  table = new Table({ places: about.places, openRow, changed: onRow, ended: () => list.refresh(), options });
  list = new ConversationList({ open: (id, found) => go(id, found), gone: (id) => { if (conversation?.id === id) go(null); }, renamed: onRenamed });
  startSettings(about, () => composer.changed());
  comparing = new Comparing({ options, models: () => (picker ? picker.names : []), changed: () => composer.changed() });
  startViewer(about.model, onRegion);
  startVideos();
  startWelcome(about, askSample);
  listen();
  for (const part of document.querySelectorAll("[data-from-start]")) part.inert = false; // a click before would have been lost
  shown = new ThreadWindow({ path: () => tree.path(), load: loadLight, draw });
  startScrolling(() => {
    shown.reset();
    draw();
  });
  for (const name of ["composer", "toasts"]) // notices stand above the composer, and the thread above both
    new ResizeObserver(() => document.documentElement.style.setProperty(`--${name}-height`, `${$(name).offsetHeight}px`)).observe($(name));
  setSide(!NARROW.matches);
  list.refresh();
  showBadge();
  await open(idInAddress());
}

/** Another model is asked from now on, or more is known of it. */
function onModel(known) {
  about = known;
  composer.setAbout(about);
  settingsFor(about);
  setModel(about.model);
  startWelcome(about, askSample);
  redrawAll();
  composer.changed();
  showBadge();
}

/** Beside the way to the diagnostics, where they have something to say. */
async function showBadge() {
  const { state, title } = await get("/api/verdict").catch(() => ({ state: "fast" }));
  $("badge").hidden = state === "fast" || state === "none";
  $("badge").className = `badge ${state}`;
  $("badge").textContent = { slower: "slower", wrong: "wrong" }[state] ?? "";
  $("badge").title = title ?? "";
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
  $("over-close").addEventListener("click", () => $("over").close());
  $("table-back").addEventListener("click", () => openRow(null));
  $("cancel-edit").addEventListener("click", () => composer.stopEditing());
  $("open-side").addEventListener("click", () => setSide($("app").classList.contains("closed")));
  for (const id of ["close-side", "veil"]) $(id).addEventListener("click", () => setSide(false));
  NARROW.addEventListener("change", () => setSide(!NARROW.matches));
  addEventListener("popstate", () => open(idInAddress()));
  listenToOthers(onOtherWindow);
  for (const id of ["open-keys", "close-keys"]) $(id).addEventListener("click", () => ($("keys").open ? $("keys").close() : showKeys()));
  addEventListener("keydown", (event) => {
    shortcut(event);
    if (event.key !== "Escape" || document.querySelector("dialog[open], [popover]:popover-open")) return;
    if (following || asked) stop();
    else if (NARROW.matches) setSide(false);
  });
}

function showKeys() {
  $("settings").close();
  $("keys").showModal();
}

/** Those that are not of one field: `settings.html` lists all. */
function shortcut(event) {
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  const typing = event.target.closest("input, textarea, select");
  if (document.querySelector("dialog[open]")) return;
  if (command && !event.shiftKey && key === "k") {
    setSide(true);
    $("search").focus();
    $("search").select();
  } else if (command && event.shiftKey && key === "o") go(null);
  else if (event.key === "?" && !command && !typing) showKeys();
  else return;
  event.preventDefault();
}

const idInAddress = () => /\/c\/([0-9a-f]+)$/.exec(location.pathname)?.[1] ?? null;

function setSide(open_) {
  $("app").classList.toggle("closed", !open_);
  $("app").classList.toggle("open", open_);
  $("open-side").setAttribute("aria-expanded", String(open_));
  $("side").inert = !open_;
}

async function go(id, found = null) {
  window.history.pushState(null, "", at(id ? `/c/${id}` : "/"));
  if (NARROW.matches) setSide(false);
  await open(id);
  if (found?.message && tree.messages.has(found.message)) await showFound(found);
}

/** The message with what was searched for, its branch shown, the words marked. */
async function showFound({ message, words }) {
  const id = message;
  if (rowsOf(tree).length) row = tree.rootOf(id);
  if (!tree.path().some((one) => one.id === id)) tree.head = tree.lastBelow(id);
  const number = tree.path().findIndex((one) => one.id === id);
  leaveEnd();
  if (!shown.of(tree.path()).some((one) => one.id === id)) shown.around(number);
  await loadLight(shown.of(tree.path()));
  draw();
  const element = $(`m-${id}`);
  if (!element) return;
  element.scrollIntoView({ block: "center" });
  element.classList.add("found");
  setTimeout(() => element.classList.remove("found"), FOUND_MS);
  mark(element, words);
}

/** By the browser's own highlights: no element is changed. */
function mark(element, words) {
  if (!CSS.highlights) return;
  const ranges = [];
  const texts = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node; (node = texts.nextNode());) {
    const text = node.data.toLowerCase();
    for (const word of words) for (let at_ = text.indexOf(word); at_ >= 0 && ranges.length < MARKS_MAX; at_ = text.indexOf(word, at_ + word.length)) {
      const range = new Range();
      range.setStart(node, at_);
      range.setEnd(node, Math.min(node.length, at_ + word.length));
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

function open(id) {
  opened = load(id, ++opening);
  return opened;
}

/** What is typed while it comes is its own, and is sent when it is there. */
async function load(id, mine) {
  following?.controller.abort();
  asked?.controller.abort();
  [following, asked] = [null, null];
  [problem, row, since] = ["", null, null];
  CSS.highlights?.delete("found");
  drawn.clear();
  views.clear();
  compared.clear();
  composer.restore(id);
  composer.setBusy(false);
  try {
    const loaded = id ? await get(`/api/conversations/${id}`) : { conversation: null, messages: [] };
    if (opening !== mine) return;
    conversation = loaded.conversation;
    tree.load(loaded.messages, conversation?.head, loaded.outline);
    shown.reset();
    if (loaded.outline) { // which has taken as long as a frame: what follows is another task
      await new Promise((go) => { setTimeout(go, 0); });
      if (opening !== mine) return;
    }
  } catch (error) {
    if (opening !== mine) return;
    toast(error.message);
    window.history.replaceState(null, "", at("/"));
    conversation = null;
    tree.load([], null);
    composer.restore(null, composer.text);
  }
  composer.changed();
  list.select(conversation?.id ?? null);
  draw();
  stayAtEnd();
  if (!matchMedia("(pointer: coarse)").matches && !document.querySelector("dialog[open]")) $("prompt").focus();
  followRunning();
}

/** An answer that is being written, or several to one message. */
async function followRunning() {
  const running = [...tree.messages.values()].filter((message) => message.state === "running");
  if (!running.length || rowsOf(tree).length) return;
  const beside = running.filter((message) => message.options?.side !== undefined);
  if (beside.length) await followBoth(tree.messages.get(beside[0].parent), beside.map((message) => ({ options: message.options, answer: message })));
  else await follow(running[0]);
}

/** A row of a table as a conversation of its own; null for the table. */
function openRow(message) {
  following?.controller.abort();
  following = null;
  composer.setBusy(false);
  row = message;
  if (message) tree.head = tree.lastBelow(message.id);
  shown.reset();
  draw();
  composer.changed();
  stayAtEnd();
}

/** A conversation of many pictures has begun, or has another row. */
async function onRow(changed, message) {
  if (!message) {
    window.history.pushState(null, "", at(`/c/${changed.id}`));
    await open(changed.id);
    if (conversation?.id !== changed.id) return changed.id; // somebody has gone elsewhere
    conversation = changed;
    draw();
    table.show(conversation.id, tree);
    return changed.id;
  }
  if (conversation?.id !== changed.id) return null;
  tree.put({ ...message, regions: null });
  if (!tree.head) [tree.head, conversation] = [message.id, changed];
  list.refreshSoon();
  draw();
  return changed.id;
}

/** Another window has changed a conversation; `id` is null where nobody knows whether one has. */
async function onOtherWindow(id) {
  await list.refresh();
  if (!conversation || (id ?? conversation.id) !== conversation.id) return;
  takeTitle();
  const listed = list.conversations.find((one) => one.id === conversation.id);
  if (id || !listed || listed.changed !== conversation.changed) await takeNews();
}

/** What other windows have added to the conversation that is shown. Where they went on from its end, so does this one. */
async function takeNews() {
  const there = opening;
  if (following || asked || composer.busy) {
    missed = true;
    return;
  }
  missed = false;
  let loaded;
  try {
    loaded = await get(`/api/conversations/${conversation.id}`);
  } catch (error) {
    if (error.status === 404 && opening === there) await leaveDeleted();
    return; // a server that is gone is noticed by whoever asks it for something
  }
  if (opening !== there) return;
  if (following || asked || composer.busy) {
    missed = true;
    return;
  }
  conversation = loaded.conversation;
  const added = tree.merge(loaded.messages, loaded.outline);
  const old = tree.head;
  tree.head = old ? tree.lastBelow(old) : conversation.head;
  if (tree.head !== old) shown.showEnd();
  draw();
  composer.changed();
  if (tree.head !== old) announce("Another window has continued this conversation");
  else if (added.includes(conversation.head) && !rowsOf(tree).length) {
    const head = conversation.head;
    toast("Another window continued another version of this conversation.", { action: { label: "Show it", run: () => showBranch(head) } });
  }
  if (tree.path().at(-1)?.state === "running") await followRunning();
}

/** What is being written stays in the message box. */
async function leaveDeleted() {
  const typed = composer.text;
  toast("This conversation was deleted in another window.");
  window.history.replaceState(null, "", at("/"));
  await open(null);
  if (typed) composer.restore(null, typed);
}

async function reload() {
  const loaded = await get(`/api/conversations/${conversation.id}`);
  conversation = loaded.conversation;
  tree.load(loaded.messages, loaded.conversation.head, loaded.outline);
  draw();
}

/** Of a long conversation the server tells most messages by their place alone. */
async function loadLight(messages) {
  const ids = messages.filter((message) => message.light).map(({ id }) => id);
  if (!ids.length) return;
  const id = conversation.id;
  const loaded = await post(`/api/conversations/${id}/messages/read`, { ids });
  if (conversation?.id === id) for (const message of loaded.messages) tree.put(message);
}

function draw() {
  const rows = rowsOf(tree);
  const whole = rows.length > 0 && !row;
  $("table").hidden = !whole;
  $("table-back").hidden = !(rows.length && row);
  $("prompt").placeholder = whole ? "Another question about all pictures" : "Message";
  if (rows.length) table.show(conversation.id, tree);
  else if (!conversation || table.conversation !== conversation.id) table.hide();
  const path = whole ? [] : tree.path();
  $("title").textContent = conversation?.title || "New chat";
  document.title = conversation?.title ? `${conversation.title} – mtmd` : "mtmd";
  $("welcome").hidden = path.length > 0 || whole;
  $("thread").hidden = path.length === 0;
  const thread = $("thread");
  const part = shown.of(path);
  seen = seenFrom();
  const keep = new Set();
  for (const message of part) keep.add(drawMessage(message, message === path.at(-1)));
  if (following?.both && path.at(-1)?.id === following.both.parent) keep.add(following.both.element);
  for (const element of [...thread.children]) if (!keep.has(element)) element.remove();
  let index = 0;
  for (const element of keep) {
    if (thread.children[index] !== element) thread.insertBefore(element, thread.children[index] ?? null);
    index += 1;
  }
  const light = part.filter((message) => message.light);
  if (light.length) loadLight(light).then(() => draw(), (error) => toast(error.message));
}

function drawMessage(message, last) {
  const running = Boolean(following || asked);
  const unanswered = last && message.role === "user" && { running, problem };
  const side = message.role === "assistant" && compared.has(message.parent) ? bySide(tree.siblings(message).map((id) => tree.messages.get(id))) : null;
  if (side?.some((one) => one.light)) loadLight(side).then(redrawAll, (error) => toast(error.message));
  const key = JSON.stringify([side?.map(({ id, state, text }) => [id, state, text?.length]), unanswered, seen === message.id, tree.siblings(message), following?.id === message.id, asked?.id === message.id]);
  const old = drawn.get(message.id);
  if (old?.message === message && old.key === key) {
    old.element.classList.toggle("last", last);
    return old.element;
  }
  const context = { tree, act, running, problem, model: about.model, last, redraw: redrawAll, view, isFull, since: seen, old: old?.element.matches(".message.answer") ? old.element : null };
  const element = message.light ? el("article", { class: "message light", id: `m-${message.id}`, "aria-busy": "true" }) : message.role === "user" ? userMessage(message, context)
    : side ? sideBySide(side.filter((one) => !one.light), context, (one) => (following?.id === one.id ? following.growing.elements : [])) : answerMessage(message, context);
  if (asked?.id === message.id && asked.element) element.append(asked.element);
  if (following?.id === message.id && !side) element.append(...following.growing.elements);
  drawn.set(message.id, { message, key, element });
  return element;
}

/** Those that were asked for together stand as they were asked for. */
const bySide = (answers) => answers.sort((one, other) => (one.options?.side ?? SIDES) - (other.options?.side ?? SIDES));

function compare(message, whether) {
  if (whether) compared.add(message);
  else compared.delete(message);
  redrawAll();
}

function view({ id }) {
  if (!views.has(id)) views.set(id, new AnswerText());
  return views.get(id);
}

function redrawAll() {
  drawn.clear();
  draw();
}

/** For the meter: where the draft would be put. */
function where(editing) {
  const whole = rowsOf(tree).length > 0 && !row; // where a question is one over all pictures anew
  return { conversation: whole ? null : conversation?.id ?? null, parent: whole ? null : editing ? editing.parent : tree.head, since: seenFrom() };
}

/** The first message that the model sees of what is shown, null for all. */
function seenFrom() {
  const path = tree.path();
  const last = since ?? path.findLast((message) => message.options?.since)?.options.since;
  return path.some((message) => message.id === last) ? last : null;
}

const withSince = (chosen) => ({ ...chosen, ...(seenFrom() ? { since: seenFrom() } : {}) });

/** As few of the oldest turns as make room for the draft and an answer. Whether there was something to drop. */
async function dropOldest() {
  const path = tree.path();
  const first = path.findIndex((message) => message.id === seenFrom());
  const turns = path.slice(Math.max(0, first) + 1).filter((message) => message.role === "user");
  let [low, high] = [0, turns.length - 1];
  try {
    while (low < high) {
      const middle = (low + high) >> 1;
      const { in_memory: known, prompt_tokens: tokens, context } = await composer.count({ ...where(null), since: turns[middle].id });
      if (!known) throw new Error("The model is not in memory; load it, or send the message, to see how much fits.");
      if (tokens <= context * ROOM) high = middle;
      else low = middle + 1;
    }
  } catch (error) {
    toast(error.message);
    return false;
  }
  if (!turns.length) {
    toast("There is only one turn, and the context has no room for more. Continue in a new chat.");
    return false;
  }
  since = turns[low].id;
  redrawAll();
  composer.changed();
  announce("The oldest turns are dropped: the model does not see them any more.");
  return true;
}

/** Send a message: it is acknowledged once it is on the server's disk. True where it is. */
async function send(text, images, editing) {
  if (rowsOf(tree).length && !row) {
    if (images.length) toast("A question about all pictures takes no other pictures.");
    else table.again(text).catch((error) => toast(`Not sent: ${error.message}`, { sticky: true }));
    return !images.length;
  }
  composer.setBusy(true);
  const there = opening; // elsewhere, another conversation is shown meanwhile
  const isLast = !editing && !tree.children.get(tree.head ?? "")?.length;
  const draft = { parent: editing ? editing.parent : tree.head, text, images: images.map(asSent), ...(isLast ? { newest: true } : {}) };
  const wanted = (comparing.on ? comparing.sides() : [options()]).map(withSince);
  try {
    const { id } = conversation ?? await begin(there);
    const sent = await arrived(id, draft) ?? await deliver(id, draft);
    if (opening !== there) {
      askUnseen(id, sent.message, wanted);
      return true;
    }
    conversation = sent.conversation;
    tree.put({ ...sent.message, regions: null });
    tree.head = sent.message.id;
    shown.showEnd();
    stayAtEnd();
    list.select(conversation.id);
    if (comparing.on) askBoth(sent.message);
    else ask(sent.message, options());
    return true;
  } catch (error) {
    if (opening === there) composer.setBusy(false);
    toast(`Not sent: ${error.message}`, { sticky: true });
    if (error.code === "newer_turn" && opening === there) takeNews();
    return false;
  }
}

async function begin(there) {
  const begun = await post("/api/conversations");
  if (opening === there) {
    conversation = begun;
    window.history.pushState(null, "", at(`/c/${begun.id}`));
    composer.moveDraft(begun.id);
  }
  return begun;
}

/** Who sent a message and looks at another conversation since finds it answered on coming back. */
async function askUnseen(id, message, wanted) {
  try {
    await Promise.all(wanted.map((chosen, side) => post(`/api/conversations/${id}/answers`, { parent: message.id, options: chosen, ...(wanted.length > 1 ? { side } : {}) }, { patient: true })));
  } catch (error) {
    toast(`A message was sent but not answered: ${error.message}`, { sticky: true });
  }
  tellOthers(id);
  list.refresh();
}

async function deliver(id, draft) {
  try {
    const sent = await post(`/api/conversations/${id}/messages`, draft);
    unsure = null;
    return sent;
  } catch (error) {
    if (error.status === 0) unsure = { ...draft, conversation: id };
    throw error;
  }
}

/** The same message where it arrived although the server's answer to it did not: nothing is sent twice. */
async function arrived(id, draft) {
  const key = ({ parent, text, images }) => JSON.stringify([parent, text.trim(), images.map(({ sha256 }) => sha256)]);
  if (unsure?.conversation !== id || key(unsure) !== key(draft)) return null;
  const loaded = await get(`/api/conversations/${id}`);
  const found = loaded.messages.find((message) => message.role === "user" && !tree.messages.has(message.id)
    && (key(message) === key(draft) || (!draft.text.trim() && message.parent === draft.parent)));
  unsure = null;
  return found ? { conversation: loaded.conversation, message: found } : null;
}

/** A sample picture with a question to it, from the first screen: what stands in the message box stays there. */
async function askSample(file, name, question) {
  if (following || composer.busy) return;
  try {
    await send(question, [await upload(await file(), name)], null);
  } catch (error) {
    toast(`Not sent: ${error.message}`, { sticky: true });
  }
}

/** `continued`: an answer that ended early, to go on from its end. */
async function ask(message, chosen, continued = null) {
  if (following || asked) return;
  [problem, unsureAnswer] = ["", null];
  const mine = asked = { id: message.id, controller: new AbortController(), element: waitingFor(chosen) };
  composer.setBusy(true);
  draw();
  try {
    const wanted = { parent: message.id, options: withSince(chosen), ...(continued ? { continues: continued.id } : {}) };
    const answer = await post(`/api/conversations/${conversation.id}/answers`, wanted, { signal: mine.controller.signal, patient: true });
    if (asked !== mine) return; // another conversation is shown
    asked = null;
    tree.put(answer);
    tree.head = answer.id;
    list.refresh();
    tellOthers(conversation.id);
    await follow(answer);
    tellOthers(answer.conversation);
  } catch (error) {
    if (asked !== mine && following) return;
    if (mine.controller.signal.aborted) {
      unsureAnswer = message.id; // the server may have begun one all the same
      if (asked === mine) endOfAsking();
      return;
    }
    asked = null;
    problem = error.message;
    unsureAnswer = error.status === 0 ? message.id : null;
    composer.setBusy(false);
    tellOthers(conversation.id);
    if (continued) {
      toast(problem, { sticky: true });
      problem = "";
    } else tree.head = message.id;
    draw();
    announce(error.message);
  }
}

/** Nobody waits for an answer any more that was not begun. */
function endOfAsking() {
  asked = null;
  composer.setBusy(false);
  draw();
}

/** What is shown until a model of several is in memory, null where it is. */
const waitingFor = ({ model }) => (picker && model && !picker.isReady(model) ? picker.waiting(model) : null);

function askBoth(message) {
  return followBoth(message, comparing.sides().map((chosen) => ({ options: withSince(chosen) })));
}

/** Two answers to one message, while they are written and when they are there. */
async function followBoth(message, parts) {
  if (following) return;
  const both = new SideBySide(conversation.id, message.id, parts, waitingFor);
  const mine = following = { id: null, both, controller: both.controller };
  [problem, unsureAnswer, tree.head] = ["", null, message.id];
  composer.setBusy(true);
  draw();
  stayAtEnd();
  const answers = await both.run();
  if (following !== mine) return; // another conversation is shown
  following = null;
  composer.setBusy(false);
  for (const error of both.errors) toast(error, { sticky: true });
  for (const answer of answers) tree.put(answer);
  if (answers.some((answer) => answer.state === "running")) await reload().catch((error) => toast(error.message));
  if (answers.length) { // one of them may have been there before, when the page was loaded in the midst of the other
    const beside = bySide(tree.siblings(answers[0]).map((id) => tree.messages.get(id)).filter((one) => one.options?.side !== undefined));
    tree.head = beside[0].id;
    if (beside.length > 1) compared.add(message.id);
    patch(`/api/conversations/${conversation.id}`, { head: tree.head }).catch((error) => toast(error.message));
  } else [problem] = both.errors;
  redrawAll();
  announce(answers.length > 1 ? "Both answers are ready" : "One answer is ready");
  composer.changed();
  tellOthers(conversation.id);
  await list.refresh();
  takeTitle();
  if (missed) await takeNews();
}

/** One of several answers, with the model and the settings that it was made with. */
function goOnWith(answer) {
  compared.delete(answer.parent);
  showBranch(answer.id);
  if (answer.options?.side === undefined) return;
  comparing.stop();
  if (picker && answer.options.model && answer.options.model !== about.model) picker.choose(answer.options.model).then(() => adopt(answer.options));
  else adopt(answer.options);
  announce("This one is continued");
}

/** To a message without one. Where it was asked for when the server went, it may be under way. */
async function answer(message) {
  if (following) return;
  if (unsureAnswer === message.id) {
    try {
      await reload();
    } catch (error) {
      [problem, unsureAnswer] = [error.message, error.status === 0 ? message.id : null];
      redrawAll();
      return;
    }
    const known = tree.messages.get(tree.children.get(message.id)?.at(-1));
    if (known) {
      [problem, unsureAnswer, tree.head] = ["", null, known.id];
      if (known.state === "running") await follow(known);
      else draw();
      return;
    }
  }
  await ask(message, options());
}

function again(old) {
  const message = tree.messages.get(old.parent);
  if (following) return toast("An answer is being written; stop it first.");
  tree.head = message.id;
  return ask(message, old.state === "failed" ? options() : optionsForAnother());
}

/** On from where an answer ended: what it says already stays, and the longer one is another version of it. */
function goOn(old) {
  if (following) return toast("An answer is being written; stop it first.");
  return ask(tree.messages.get(old.parent), options(), old);
}

/** Whether an answer took what the context had left: it cannot go on before something makes room. */
function isFull({ receipt }) {
  const { context, model } = about;
  return receipt?.finish === "length" && receipt.model === model && context !== null && receipt.prompt_tokens + receipt.output_tokens >= context;
}

/** The same once older turns made room for more. */
async function goOnWithRoom(old) {
  if (following) return toast("An answer is being written; stop it first.");
  if (await dropOldest()) await goOn(old);
}

/** Whether the server is back, and what it has. */
function look() {
  return open(conversation.id);
}

/** Show an answer as it is written, from its beginning: also after a reload of the page in its midst, and over broken
 * connections. */
async function follow(running) {
  const mine = { id: running.id, controller: new AbortController(), growing: new Growing(), left: false };
  following = mine;
  composer.setBusy(true);
  draw();
  let ended = null;
  try {
    for await (const event of events(running.id, mine.controller.signal, (whether) => connected(mine, whether))) {
      if (event.type === "end") ended = event;
      else mine.growing.take(event);
    }
  } catch (error) {
    if (following !== mine) return; // another conversation is shown
    if (!mine.left && (!(error instanceof ServerError) || error.code !== "ended")) toast(error.message, { sticky: true });
  }
  following = null;
  views.set(running.id, mine.growing.view); // drawn on, not anew
  composer.setBusy(false);
  if (ended?.message?.id) {
    tree.put({ ...ended.message, unsaved: ended.unsaved });
    draw();
    announce(`Answer: ${ended.message.text}`);
  } else await settle(running, mine.growing.text);
  composer.changed();
  await list.refresh();
  takeTitle();
  if (missed) await takeNews();
}

function connected(mine, whether) {
  const lost = !mine.growing.lost.hidden;
  mine.growing.connected(whether);
  if (lost && whether) announce("Connected again");
}

/** An answer whose end was not told: as the server has it, but with everything that was `read` here, and where it ended. A server
 * that ended had not saved the last words; it is given them back. */
async function settle(running, read) {
  try {
    await reload();
  } catch {
    tree.put({ ...running, text: read, state: "lost" });
    draw();
    return;
  }
  const stored = tree.messages.get(running.id);
  if (stored && stored.state !== "complete" && read.length > stored.text.length) {
    tree.put({ ...stored, text: read });
    draw();
    const kept = await post(`/api/answers/${running.id}/read`, { text: read }).catch(() => null); // without it they are here, until the page is left
    if (kept && tree.messages.has(kept.id)) tree.put(kept);
  }
  draw();
}

/** The title that the server has given this conversation meanwhile. */
function takeTitle() {
  const listed = list.conversations.find((one) => one.id === conversation?.id);
  if (listed && listed.title !== conversation.title) onRenamed({ ...conversation, title: listed.title });
}

async function stop() {
  const mine = following;
  if (!mine) {
    asked?.controller.abort();
    return;
  }
  $("stop").disabled = true;
  try {
    if (mine.both) {
      await mine.both.stop();
      return;
    }
    await post(`/api/answers/${mine.id}/stop`);
  } catch (error) {
    if (error.status === 0) { // nobody there to be told: what was read stays
      mine.left = true;
      mine.controller.abort();
    } else toast(error.message);
  } finally {
    $("stop").disabled = false;
  }
}

function showBranch(id) {
  if (following) {
    toast("An answer is being written; stop it first.");
    return;
  }
  tree.head = tree.lastBelow(id);
  problem = "";
  const path = tree.path();
  shown.follow(path.findIndex((message) => message.id === id), path.length);
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

function onRegion(item, blob) {
  composer.attachRegion(blob, `region of ${item.title}`);
}

start().catch((error) => toast(error.message, { sticky: true }));
