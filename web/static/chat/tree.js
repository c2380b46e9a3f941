// A conversation as a tree of messages, of which one branch is shown.

export class Tree {
  constructor() {
    this.messages = new Map();
    this.children = new Map();
    this.head = null;
  }

  /** `outline`: of a long conversation, every message by its place alone; `messages` are those of them that are whole. */
  load(messages, head, outline = null) {
    this.messages = new Map();
    this.children = new Map();
    const whole = outline && new Map(messages.map((message) => [message.id, message]));
    for (const message of outline ? placesIn(outline) : messages) this.put(whole?.get(message.id) ?? message);
    this.head = this.messages.has(head) ? head : [...this.messages.keys()].at(-1) ?? null;
  }

  /** Put what is new or has changed of what the server has; the rest stays as it is, and so does the branch that is shown. Gives the
   * ids that were not known. */
  merge(messages, outline = null) {
    const whole = new Map(messages.map((message) => [message.id, message]));
    const added = [];
    for (const message of outline ? placesIn(outline) : messages) {
      const known = this.messages.get(message.id);
      const read = whole.get(message.id);
      if (!known) added.push(message.id);
      if (!known || (read && (known.light || known.state !== read.state || known.text !== read.text))) this.put(read ?? message);
    }
    return added;
  }

  put(message) {
    this.branch = null;
    if (!this.messages.has(message.id)) {
      const parent = message.parent ?? "";
      if (!this.children.has(parent)) this.children.set(parent, []);
      this.children.get(parent).push(message.id);
    }
    this.messages.set(message.id, message);
  }

  /** The branch that is shown, from the first message on. */
  path() {
    if (this.branch?.head === this.head) return this.branch.path;
    const path = [];
    for (let id = this.head; id;) {
      const message = this.messages.get(id);
      path.push(message);
      id = message.parent;
    }
    this.branch = { head: this.head, path: path.reverse() };
    return path;
  }

  siblings(message) {
    return this.children.get(message.parent ?? "") ?? [];
  }

  /** The first message of the branch that this one stands in. */
  rootOf(id) {
    let at = this.messages.get(id);
    while (at.parent) at = this.messages.get(at.parent);
    return at;
  }

  /** The newest message below this one: where its branch is taken up again. */
  lastBelow(id) {
    let last = id;
    for (let next; (next = this.children.get(last)?.at(-1));) last = next;
    return last;
  }

  /** Pictures of the branch before `message`, in order: those of its receipt, so none that was not shown to the model. */
  picturesBefore(message) {
    const pictures = [];
    for (let id = message.parent; id;) {
      const { images, parent } = this.messages.get(id);
      for (let number = images.length; number > 0;) pictures.push(images[number -= 1]);
      id = id === message.options?.since ? null : parent;
    }
    return pictures.reverse();
  }
}

const NO_IMAGES = [];

/** The messages of an outline: {ids, up, roles, images, since}, `up` how far before each its parent stands, 0 for none. */
function* placesIn({ ids, up, roles, images, since }) {
  for (let place = 0; place < ids.length; place += 1) {
    const first = since[place];
    yield { id: ids[place], parent: up[place] ? ids[place - up[place]] : null, role: roles[place] === "u" ? "user" : "assistant",
      images: images[place] ?? NO_IMAGES, options: first ? { since: first } : null, light: true };
  }
}
