// Of a long conversation only a part is on the page: what is near to what is looked at. More of it comes as somebody scrolls there.

import { $ } from "../shared/dom.js";

const AT_FIRST = 40; // messages
const STEP = 30;
const AHEAD = "1200px";

/** `path()`: the messages that are shown, if all were; `load(messages)` fetches what is not here of them; `draw()`. */
export class ThreadWindow {
  constructor({ path, load, draw }) {
    Object.assign(this, { path, load, draw });
    this.reset();
    const seen = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.#extend(target === $("earlier"));
    }, { root: $("scroll"), rootMargin: AHEAD });
    for (const id of ["earlier", "later"]) seen.observe($(id));
    this.seen = seen;
  }

  /** The end of the branch. */
  reset() {
    [this.first, this.last] = [null, Infinity];
  }

  /** Around the message with this number. */
  around(number) {
    [this.first, this.last] = [Math.max(0, number - STEP / 2), number + STEP / 2];
  }

  /** What is drawn of `path`, and tells whether there is more. */
  of(path) {
    this.first = Math.min(this.first ?? Math.max(0, path.length - AT_FIRST), Math.max(0, path.length - 1));
    $("earlier").hidden = this.first === 0;
    $("later").hidden = this.last >= path.length;
    return path.slice(this.first, this.last);
  }

  async #extend(up) {
    const path = this.path();
    if (this.busy || (up ? !this.first : this.last >= path.length)) return;
    this.busy = true;
    try {
      const [from, to] = up ? [Math.max(0, this.first - STEP), this.first] : [this.last, this.last + STEP];
      await this.load(path.slice(from, to));
      if (up) this.first = from;
      else this.last = to >= path.length ? Infinity : to;
      this.#keepPlace(up);
    } finally {
      this.busy = false;
    }
    for (const id of ["earlier", "later"]) { // still in sight: told of again
      this.seen.unobserve($(id));
      this.seen.observe($(id));
    }
  }

  /** What is looked at stays where it is while more comes above it. */
  #keepPlace(up) {
    const scroll = $("scroll");
    const anchor = $("thread").firstElementChild;
    const before = anchor?.getBoundingClientRect().top;
    this.draw();
    if (up && anchor?.isConnected) scroll.scrollTop += anchor.getBoundingClientRect().top - before;
  }
}
