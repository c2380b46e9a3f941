// A command to be typed into a terminal, with a button that copies it.

import { copyText, el, icon, iconButton } from "./dom.js";

const TOLD_MS = 1500;

export function commandBox(command) {
  const copy = iconButton("copy", "Copy the command", async () => {
    await copyText(command);
    copy.replaceChildren(icon("done"));
    setTimeout(() => copy.replaceChildren(icon("copy")), TOLD_MS);
  });
  return el("span", { class: "command" }, el("code", {}, command), copy);
}
