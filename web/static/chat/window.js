// Of a long conversation only a part is on the page: what is near to what is looked at. More of it comes as somebody scrolls there.

import { $ } from "../shared/dom.js";

const AT_FIRST = 6; // messages
const READ = 30; // asked for at once
const MOST = 120; // on the page; what is farther away goes
const AHEAD = "1200px";
const FRAME_MS = 8; // for making what comes: then the page may answer somebody

/** `path()`: the messages that are shown, if all were; `load(messages)` fetches what is not here of them; `draw()`. */
export class ThreadWindow {
  constructor({ path, load, draw }) {
    Object.assign(this, { path, load, draw });
    this.step = 4; // messages that are made at once
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

  /** What is put at the end is on the page. */
  showEnd() {
    if (this.last !== Infinity) this.reset();
  }

  /** Around the message with this number. */
  around(number) {
    [this.first, this.last] = [Math.max(0, number - AT_FIRST / 2), number + AT_FIRST / 2];
  }

  /** Another branch of `length` messages is shown, for the sake of the message with this number. */
  follow(number, length) {
    if (this.last === Infinity && (length <= this.first || length - this.first > MOST)) this.around(number);
  }

  /** What is drawn of `path`, and tells whether there is more. */
  of(path) {
    if (this.last >= path.length) this.last = Infinity;
    const end = Math.min(path.length, this.last);
    this.first = Math.min(Math.max(this.first ?? end - AT_FIRST, end - MOST - READ, 0), Math.max(0, path.length - 1));
    $("earlier").hidden = this.first === 0;
    $("later").hidden = this.last >= path.length;
    return path.slice(this.first, this.last);
  }

  async #extend(up) {
    const path = this.path();
    if (this.busy || (up ? !this.first : this.last >= path.length)) return;
    this.busy = true;
    const place = [this.first, this.last];
    try {
      const [from, to] = up ? [Math.max(0, this.first - this.step), this.first] : [this.last, this.last + this.step];
      if (path.slice(from, to).some((message) => message.light)) await this.load(up ? path.slice(Math.max(0, to - READ), to) : path.slice(from, from + READ));
      if (place[0] !== this.first || place[1] !== this.last) return; // something else is looked at meanwhile
      if (up) [this.first, this.last] = [from, this.last > from + MOST && path.length > from + MOST ? from + MOST : this.last];
      else [this.first, this.last] = [Math.max(this.first, to - MOST), to >= path.length ? Infinity : to];
      this.#keepPlace();
    } finally {
      this.busy = false;
    }
    for (const id of ["earlier", "later"]) { // still in sight: told of again
      this.seen.unobserve($(id));
      this.seen.observe($(id));
    }
  }

  /** What is looked at stays where it is while more comes above it, or less. */
  #keepPlace() {
    const scroll = $("scroll");
    const top = scroll.getBoundingClientRect().top;
    const anchor = [...$("thread").children].find((message) => message.getBoundingClientRect().bottom > top);
    const before = anchor?.getBoundingClientRect().top;
    const began = performance.now();
    this.draw();
    if (anchor?.isConnected) scroll.scrollTop += anchor.getBoundingClientRect().top - before;
    const took = performance.now() - began;
    this.step = Math.max(1, Math.min(READ, took > 2 * FRAME_MS ? this.step >> 1 : took < FRAME_MS ? this.step * 2 : this.step));
  }
}
