// Other windows of the same server, in this browser and elsewhere: what they add to a conversation shows here too.

import { at } from "../shared/server.js";

const channel = "BroadcastChannel" in window ? new BroadcastChannel(`mtmd ${at("/")}`) : null;

/** Tell the other windows of this browser that a conversation has changed. */
export function tellOthers(conversation) {
  channel?.postMessage(conversation);
}

/** `changed(conversation)`: called with the id of one that another window has changed, and with null where one may have been changed by
 * somebody else: when this window is looked at again, or the network is back. */
export function listenToOthers(changed) {
  channel?.addEventListener("message", ({ data }) => changed(String(data)));
  const look = () => { if (!document.hidden) changed(null); };
  for (const kind of ["focus", "online"]) addEventListener(kind, look);
  addEventListener("pageshow", ({ persisted }) => { if (persisted) look(); });
  document.addEventListener("visibilitychange", look);
}
