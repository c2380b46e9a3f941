// Everything that a browser does a little later does it late: answers of the server, events that it
// sends on its own, files and pictures that are read. See `LATE` in browsing.py.
(() => {
  const LATE_MS = MILLISECONDS;
  const EVENTS = new Set(["close", "toggle", "load", "error", "message", "popstate", "hashchange", "storage", "scroll", "scrollend", "selectionchange",
    "loadedmetadata", "loadeddata", "seeked", "canplay", "play", "pause", "transitionend", "animationend"]);
  const later = window.setTimeout.bind(window);
  const late = (holder, name) => {
    const usual = holder[name];
    holder[name] = async function (...given) {
      const result = await usual.apply(this, given);
      await new Promise((go) => later(go, LATE_MS));
      return result;
    };
  };
  const listen = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (type, listener, options) {
    const slow = EVENTS.has(type) && typeof listener === "function";
    return listen.call(this, type, slow ? function (event) { later(() => listener.call(this, event), LATE_MS); } : listener, options);
  };
  late(window, "fetch");
  late(window, "createImageBitmap");
  for (const name of ["text", "arrayBuffer"]) late(Blob.prototype, name);
  for (const name of ["text", "arrayBuffer", "json", "blob"]) late(Response.prototype, name);
  const draw = HTMLCanvasElement.prototype.toBlob;
  HTMLCanvasElement.prototype.toBlob = function (take, ...given) { return draw.call(this, (blob) => later(() => take(blob), LATE_MS), ...given); };
})();
