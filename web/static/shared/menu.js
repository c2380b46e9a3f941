// Menus: popovers that open at a button, with arrow keys from entry to entry.

const GAP = 6; // CSS pixels between a button and its menu, and between a menu and the window

/** Keys of a menu; `popover` closes it by Escape and by a click elsewhere. */
export function startMenu(menu) {
  menu.addEventListener("keydown", (event) => {
    const all = entries(menu);
    const now = all.indexOf(document.activeElement);
    const next = { ArrowDown: (now + 1) % all.length, ArrowUp: (now - 1 + all.length) % all.length, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    all[next].focus();
  });
}

/** Below its button, or above it where there is no room below. */
export function openMenu(menu, button) {
  const at = button.getBoundingClientRect();
  menu.showPopover();
  const [width, height] = [menu.offsetWidth, menu.offsetHeight];
  const fits = at.bottom + GAP + height <= innerHeight - GAP;
  menu.style.left = `${Math.max(GAP, Math.min(at.left, innerWidth - width - GAP))}px`;
  menu.style.top = `${fits ? at.bottom + GAP : Math.max(GAP, at.top - GAP - height)}px`;
  entries(menu)[0]?.focus();
}

const entries = (menu) => [...menu.querySelectorAll("[role=menuitem]")].filter((entry) => entry.offsetParent !== null || entry.getClientRects().length);
