// Elements as they shall be, with as little changed as possible: what somebody has selected, opened or scrolled stays so.

/** The children of `parent` from number `from` on become like `wanted`. */
export function morph(parent, wanted, from = 0) {
  wanted.forEach((node, index) => {
    const old = parent.childNodes[from + index];
    if (!old) parent.append(node);
    else if (!become(old, node)) old.replaceWith(node);
  });
  while (parent.childNodes.length > from + wanted.length) parent.lastChild.remove();
}

function become(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (wanted.data.startsWith(old.data)) old.appendData(wanted.data.slice(old.data.length));
    else old.data = wanted.data;
    return true;
  }
  if (old.dataset?.is !== wanted.dataset?.is) return false; // made in one piece, from what `is` says
  if (old.dataset?.is) return true;
  for (const { name } of [...old.attributes]) if (!wanted.hasAttribute(name) && !(name === "open" || name === "tabindex")) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morph(old, [...wanted.childNodes]);
  return true;
}
