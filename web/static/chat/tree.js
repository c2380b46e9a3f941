// A conversation as a tree of messages, of which one branch is shown.

export class Tree {
  constructor() {
    this.messages = new Map();
    this.children = new Map();
    this.head = null;
  }

  load(messages, head) {
    this.messages = new Map();
    this.children = new Map();
    for (const message of messages) this.put(message);
    this.head = this.messages.has(head) ? head : messages.at(-1)?.id ?? null;
  }

  put(message) {
    if (!this.messages.has(message.id)) {
      const parent = message.parent ?? "";
      if (!this.children.has(parent)) this.children.set(parent, []);
      this.children.get(parent).push(message.id);
    }
    this.messages.set(message.id, message);
  }

  /** The branch that is shown, from the first message on. */
  path() {
    const path = [];
    for (let id = this.head; id; id = this.messages.get(id).parent) path.push(this.messages.get(id));
    return path.reverse();
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
    for (let id = message.parent; id; id = id === message.options?.since ? null : this.messages.get(id).parent) pictures.push(...[...this.messages.get(id).images].reverse());
    return pictures.reverse();
  }
}
