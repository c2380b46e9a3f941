// The end of the thread stays in view while it grows, until somebody scrolls up.

import { $ } from "../shared/dom.js";

const NEAR_END = 80; // pixels
const HAND_MS = 300; // a scroll so soon after a wheel or touch was meant

let pinned = true;
let byHand = 0;
let dragging = false;
let top_ = 0;
let whole = () => {}; // the end is to be on the page

/** `toTheEnd()`: called before the end is gone to. */
export function startScrolling(toTheEnd) {
  whole = toTheEnd;
  const scroll = $("scroll");
  scroll.addEventListener("scroll", onScroll);
  for (const kind of ["wheel", "touchmove", "keydown"]) scroll.addEventListener(kind, () => { byHand = performance.now(); }, { passive: true });
  scroll.addEventListener("pointerdown", () => { dragging = true; });
  addEventListener("pointerup", () => { dragging = false; });
  $("down").addEventListener("click", () => {
    whole();
    stayAtEnd();
  });
  $("thread").addEventListener("click", (event) => { if (event.target.closest("summary")) pinned = false; }, { capture: true }); // what opens stays where it is
  const resized = new ResizeObserver(() => { if (pinned && !$("thread").hidden) toEnd(); });
  for (const id of ["thread", "scroll"]) resized.observe($(id));
}

export function stayAtEnd() {
  pinned = true;
  if ($("thread").hidden) $("scroll").scrollTop = 0; // the first screen and tables are read from their beginning
  else toEnd();
}

/** Something else is to be seen than the end. */
export function leaveEnd() {
  pinned = false;
}

function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** Only a hand leaves the end: content that changes its height moves the scroll position too. */
function onScroll() {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  const near = scrollHeight - scrollTop - clientHeight < NEAR_END;
  if (near && $("later").hidden) pinned = true;
  else if (scrollTop < top_ && (dragging || performance.now() - byHand < HAND_MS)) pinned = false;
  top_ = scrollTop;
  $("down").hidden = near && $("later").hidden;
}
