// The list of conversations: search, open, rename, export, delete, import.

import { $, copyText, el, iconButton, icon, toast } from "../shared/dom.js";
import { isolated, plural } from "../shared/format.js";
import { openMenu, startMenu } from "../shared/menu.js";
import { at, download, get, patch, post, remove, save, show, smallPath } from "../shared/server.js";
import { fromElsewhere } from "../history/foreign.js";
import { markdownOf } from "../history/markdown.js";
import { tellOthers } from "./other_windows.js";
import { Tree } from "./tree.js";

const SEARCH_AFTER_MS = 150;
const UNDO_MS = 8000;
const IN_SIGHT = 24; // conversations, which are drawn at once
const SLICE_MS = 8; // for drawing more of them: then the page may answer somebody
const DAY_S = 86_400;
const MOST_READ = 200; // messages at once
const OURS = { format: "mtmd conversations", version: 1 };

export class ConversationList {
  /** `open(id)`, `gone(id)`, `renamed(conversation)` are called with what was chosen. */
  constructor({ open, gone, renamed }) {
    Object.assign(this, { open, gone, renamed });
    this.current = null;
    this.conversations = [];
    this.items = new Map(); // id -> {key, element}
    this.leaving = new Map(); // id -> function that deletes it now: deleted here, and on the server once it cannot be undone
    addEventListener("pagehide", () => { for (const now of this.leaving.values()) now({ keepalive: true }); });
    $("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), SEARCH_AFTER_MS);
    });
    $("search").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && $("search").value) {
        event.stopPropagation();
        $("search").value = "";
        this.refresh();
      }
    });
    $("export-all").addEventListener("click", (event) => {
      event.preventDefault();
      download("/api/export").catch((error) => toast(error.message));
    });
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import($("import-file").files[0]));
    this.seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) {
        this.seen.unobserve(target);
        show(target, smallPath(target.dataset.sha256));
      }
    }, { root: $("list"), rootMargin: "200px" });
    this.menu = el("div", { class: "menu", popover: "auto", role: "menu" });
    startMenu(this.menu);
    document.body.append(this.menu);
  }

  async refresh() {
    const query = $("search").value.trim();
    try {
      const { conversations } = await get(`/api/conversations${query ? `?q=${encodeURIComponent(query)}` : ""}`);
      if (query !== $("search").value.trim()) return;
      const told = JSON.stringify([query, conversations]);
      this.conversations = conversations;
      if (told !== this.told) this.draw();
      this.told = told;
    } catch (error) {
      if (error.status !== 0 || query) toast(error.message); // who is not there is told by whatever was asked for
    }
  }

  /** Once, however often it is asked for meanwhile. */
  refreshSoon() {
    this.soon ??= setTimeout(() => {
      this.soon = null;
      this.refresh();
    }, SEARCH_AFTER_MS);
  }

  select(id) {
    this.current = id;
    for (const item of $("list").querySelectorAll(".item")) this.#markCurrent(item, item.dataset.id === id);
  }

  #markCurrent(item, current) {
    item.classList.toggle("current", current);
    const link = item.querySelector("a");
    if (current) link?.setAttribute("aria-current", "page");
    else link?.removeAttribute("aria-current");
  }

  /** What is as it was stays the element that it is; the rest is made a few at a time, those in sight first. */
  draw() {
    const query = $("search").value.trim();
    const conversations = this.conversations.filter(({ id }) => !this.leaving.has(id));
    const parts = conversations.length ? grouped(conversations, query) : [el("p", { class: "empty" }, query ? "Nothing found." : "Conversations will be listed here.")];
    const list = $("list");
    const place = list.scrollTop;
    const wanted = new Set(conversations.map(({ id }) => id));
    for (const [id, { element }] of this.items) if (!wanted.has(id)) {
      element.remove();
      this.items.delete(id);
    }
    for (const other of [...list.children].filter((child) => !child.matches(".item"))) other.remove();
    let index = 0;
    clearTimeout(this.drawing);
    const some = () => {
      const until = performance.now() + SLICE_MS;
      while (index < parts.length) {
        const part = parts[index];
        const element = part instanceof Node ? part : this.#known(part, query);
        if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
        index += 1;
        if (index >= IN_SIGHT && performance.now() > until) {
          this.drawing = setTimeout(some, 0);
          return;
        }
      }
      while (list.children.length > parts.length) list.lastChild.remove();
      if (list.scrollTop < place) list.scrollTop = place;
    };
    some();
  }

  #known(conversation, query) {
    const key = JSON.stringify([conversation, query]);
    const known = this.items.get(conversation.id);
    if (known?.key === key) return known.element;
    known?.element.remove(); // or all that follow would have to move
    const element = this.#item(conversation);
    this.items.set(conversation.id, { key, element });
    return element;
  }

  #item(conversation) {
    const { id, title, around, running, picture, message } = conversation;
    const link = el("a", { href: at(`/c/${id}`), "aria-current": id === this.current ? "page" : null, on: { click: (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      this.open(id, message ? { message, words: $("search").value.toLowerCase().split(" ").filter(Boolean) } : null);
    } } }, el("span", { dir: "auto" }, title || "New chat"), around ? el("span", { class: "around", dir: "auto" }, around) : null);
    const thumbnail = picture ? el("img", { class: "first", alt: "", width: 26, height: 26, dataset: { sha256: picture } }) : null;
    if (thumbnail) this.seen.observe(thumbnail);
    const more = iconButton("more", `More about ${title || "this conversation"}`, () => this.#showMenu(conversation, more, item));
    more.setAttribute("aria-haspopup", "menu");
    const item = el("div", { dataset: { id }, class: `item${id === this.current ? " current" : ""}` }, thumbnail, link, running ? el("span", { class: "dot", title: "Being answered" }) : null, more);
    return item;
  }

  #showMenu(conversation, button, item) {
    const entry = (name, label, run, kind = "") => el("button", { class: `quiet-button ${kind}`, type: "button", role: "menuitem",
      on: { click: () => { this.menu.hidePopover(); run(); } } }, icon(name), label);
    this.menu.replaceChildren(
      entry("pin", conversation.pinned ? "Unpin" : "Pin", () => this.#pin(conversation)),
      entry("edit", "Rename", () => this.#rename(conversation, item)),
      entry("copy", "Copy as Markdown", () => this.#markdown(conversation, copyText)),
      entry("out", "Export as Markdown", () => this.#markdown(conversation, (text) => save(new Blob([text], { type: "text/markdown" }), "conversation.md"))),
      entry("out", "Export as JSON", () => download(`/api/conversations/${conversation.id}/export`).catch((error) => toast(error.message))),
      entry("trash", "Delete", () => this.#delete(conversation), "danger"));
    openMenu(this.menu, button);
  }

  /** The branch that is shown, given to `use`. */
  async #markdown({ id }, use) {
    try {
      const { conversation, messages, outline } = await get(`/api/conversations/${id}`);
      const tree = new Tree();
      tree.load(messages, conversation.head, outline);
      const light = tree.path().filter((message) => message.light).map((message) => message.id);
      for (let at_ = 0; at_ < light.length; at_ += MOST_READ) {
        const read = await post(`/api/conversations/${id}/messages/read`, { ids: light.slice(at_, at_ + MOST_READ) });
        for (const message of read.messages) tree.put(message);
      }
      await use(markdownOf(conversation.title, tree.path()));
    } catch (error) {
      toast(error.message);
    }
  }

  async #pin({ id, pinned }) {
    try {
      await patch(`/api/conversations/${id}`, { pinned: !pinned });
      tellOthers(id);
      await this.refresh();
    } catch (error) {
      toast(error.message);
    }
  }

  #rename(conversation, item) {
    let over = false;
    const end = async (keep) => {
      if (over) return;
      over = true;
      const title = input.value.trim();
      if (keep && title && title !== conversation.title) {
        try {
          this.renamed(await patch(`/api/conversations/${conversation.id}`, { title }));
          tellOthers(conversation.id);
        } catch (error) {
          toast(error.message);
        }
      }
      this.items.delete(conversation.id);
      this.told = null;
      this.refresh();
    };
    const input = el("input", { value: conversation.title, maxLength: 200, dir: "auto", "aria-label": "Title", on: {
      blur: () => end(true),
      keydown: (event) => { if (event.key === "Enter" || event.key === "Escape") { event.stopPropagation(); end(event.key === "Enter"); } },
    } });
    item.replaceChildren(input);
    input.focus();
    input.select();
  }

  /** Gone from the list at once, from the server when nobody has undone it, or the page is left. */
  #delete(conversation) {
    const { id, title } = conversation;
    const now = async (options) => {
      clearTimeout(timer);
      if (!this.leaving.has(id)) return;
      try {
        await remove(`/api/conversations/${id}`, options);
        tellOthers(id);
        this.conversations = this.conversations.filter((one) => one.id !== id);
      } catch (error) {
        toast(`“${isolated(title || "New chat")}” is not deleted. ${error.message}`);
      }
      this.leaving.delete(id);
      this.refresh();
    };
    const undo = () => {
      clearTimeout(timer);
      this.leaving.delete(id);
      this.draw();
      if (shown) this.open(id);
    };
    const timer = setTimeout(now, UNDO_MS);
    const shown = this.current === id;
    this.leaving.set(id, now);
    this.draw();
    this.gone(id);
    toast(`Deleted “${isolated(title || "New chat")}”.`, { action: { label: "Undo", run: undo }, closed: now, ms: UNDO_MS });
  }

  /** One conversation at a time, with the pictures it needs: a large history would be more than one request may bring. */
  async #import(file) {
    $("import-file").value = "";
    if (!file) return;
    let count = 0;
    try {
      const read = await file.text().then(JSON.parse);
      const foreign = read.format === OURS.format ? null : fromElsewhere(read);
      const { conversations, images, ...rest } = foreign ? { ...OURS, ...foreign } : read;
      for (const conversation of conversations) {
        const needed = conversation.messages.flatMap((message) => (message.images ?? []).map((image) => image.sha256));
        const own = Object.fromEntries(needed.filter((name) => name in images).map((name) => [name, images[name]]));
        await post("/api/import", { ...rest, conversations: [conversation], images: own });
        count += 1;
      }
      toast(`${plural(count, "conversation")} imported.`);
    } catch (error) {
      const words = error.status === undefined ? file.name.endsWith(".zip") ? "Unpack it first: the conversations are in conversations.json." : "This file has no conversations of mtmd, ChatGPT or Open WebUI." : error.message;
      toast(count ? `${words} ${plural(count, "conversation")} before it were imported.` : words, { sticky: true });
    }
    this.refresh();
  }
}

/** The conversations with a heading before those of one age. */
function grouped(conversations, query) {
  if (query) return conversations;
  let last = "";
  return conversations.flatMap((conversation) => {
    const name = conversation.pinned ? "Pinned" : age(conversation.changed);
    const heading = name === last ? [] : [el("h2", {}, name)];
    last = name;
    return [...heading, conversation];
  });
}

function age(seconds) {
  const midnight = new Date().setHours(0, 0, 0, 0) / 1000;
  if (seconds >= midnight) return "Today";
  if (seconds >= midnight - DAY_S) return "Yesterday";
  if (seconds >= midnight - 7 * DAY_S) return "The last seven days";
  return new Date(seconds * 1000).toLocaleDateString("en", { month: "long", year: "numeric" });
}
