// Keys of an input method, with which Chinese, Japanese and Korean are written: Enter and Escape there choose and give up
// characters, and mean nothing to the page.

const COMPOSING = 229; // the key code of a key that an input method took; Safari says no more of the Enter that ends a composition

export const isComposing = (event) => event.isComposing || event.keyCode === COMPOSING;

/** From now on no handler of this page sees a key that an input method took, and none of them submits a form or closes a dialog. */
export function ignoreComposing() {
  let taken = false; // such a key is down
  const capture = { capture: true };
  addEventListener("keydown", (event) => {
    taken = isComposing(event);
    if (taken) event.stopImmediatePropagation();
  }, capture);
  for (const kind of ["keyup", "pointerdown"]) addEventListener(kind, () => { taken = false; }, capture);
  for (const kind of ["submit", "cancel"]) addEventListener(kind, (event) => {
    if (!taken) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }, capture);
}
