// The diagnostics page: what the server does now, asked for every second, and its warm-up report.

import { $, copyText, el, icon, svg, themeButton, toast } from "../shared/dom.js";
import { commandBox } from "../shared/command.js";
import { STAGES, milliseconds } from "../shared/format.js";
import { ignoreComposing } from "../shared/keys.js";
import { at, get, getText } from "../shared/server.js";

const EVERY_MS = 1000;
const KEPT = 120; // samples of each line
const GIB = 2 ** 30;

const WHICH = new URLSearchParams(location.search).get("model"); // of several models
const of = (path, ...more) => {
  const asked = [...(WHICH ? [`model=${encodeURIComponent(WHICH)}`] : []), ...more].join("&");
  return asked ? `${path}?${asked}` : path;
};
const samples = [];
let fault; // why the server cannot answer, null where it can
let known = null; // answers that the chart of the latest has
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });

function tiles(target, rows) {
  target.replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Increase of a counter a second, sample by sample; a server that was started again counts from 0. */
function rates(name) {
  return samples.slice(1).map((sample, index) => Math.max(0, sample[name] - samples[index][name]) / ((sample.at - samples[index].at) / 1000));
}

const gauge = (name, scale) => samples.map((sample) => sample[name] / scale);

/** `more`: words behind the numbers. */
function line([title, values, unit, more = ""]) {
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${((KEPT - values.length + index) / (KEPT - 1)) * 1000} ${98 - (value / most) * 92}`);
  const shape = points.length > 1 ? `M${points.join("L")}` : "";
  const first = points[0]?.split(" ")[0];
  return el("figure", { class: "line" },
    el("figcaption", {}, el("span", {}, title), el("span", {}, `${number(values.at(-1) ?? 0)} ${unit}, max ${number(Math.max(0, ...values))}${more}`)),
    el("div", { class: "plot" }, el("span", { class: "most" }, number(most)), el("span", { class: "none" }, "0"),
      svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("path", { class: "axis", d: "M0 98L1000 98M0 6L1000 6" }), svg("path", { class: "area", d: shape ? `${shape}L1000 98L${first} 98Z` : "" }), svg("path", { d: shape }))),
    el("div", { class: "ago" }, el("span", {}, `${(KEPT * EVERY_MS) / 60_000} minutes ago`), el("span", {}, "now")));
}

function draw(stats) {
  if (stats.fault !== fault) showVerdict(); // which begins with it
  fault = stats.fault;
  const answered = stats.finished + stats.cancelled;
  tiles($("now"), [
    ["being answered", `${stats.running} of ${stats.slots}`], ["waiting", number(stats.waiting)], ["pictures being encoded", number(stats.encoding)],
    ["context memory in use", stats.pages ? `${number((100 * stats.pages_used) / stats.pages)} %` : "none"]]);
  $("lines").replaceChildren(...[
    ["Tokens written", rates("output_tokens"), "tokens/s", stats.alone_tokens_s ? `; one answer alone up to ${number(stats.alone_tokens_s)}` : ""],
    ["Requests taken", rates("requests"), "requests/s"], ["Tiles encoded", rates("encode_tiles"), "tiles/s"],
    ["Cores in use", rates("cpu_seconds"), `of ${stats.cpus}`],
    ...(stats.resident_bytes === null ? [] : [["Memory of the server", gauge("resident_bytes", GIB), "GiB"]])].map(line));
  tiles($("since"), [
    ["requests", number(stats.requests)], ["answers", number(stats.finished)], ["stopped", number(stats.cancelled)], ["failed", number(stats.failed)],
    ["turned away", number(stats.rejected)], ["pictures", number(stats.images)],
    ["pictures from the cache", stats.images ? `${number((100 * stats.image_cache_hits) / stats.images)} %` : "none"],
    ["prompt from the cache", stats.prompt_tokens ? `${number((100 * stats.reused_tokens) / stats.prompt_tokens)} %` : "none"],
    ["proposed tokens accepted", stats.proposed_tokens ? `${number((100 * stats.accepted_tokens) / stats.proposed_tokens)} %` : "none proposed"],
    ["tokens a batch", stats.batches ? number(stats.batch_rows / stats.batches) : "none"], ["preempted", number(stats.preemptions)]]);
  stages(stats, answered);
}

/** Mean time of each stage of an answer. */
function stages(stats, answered) {
  if (!answered) return;
  const most = Math.max(...STAGES.map(([name]) => stats[name])) || 1;
  $("stages").replaceChildren(el("h3", {}, "Mean time of an answer, by stage"), el("table", { class: "bars" }, STAGES.map(([name, label]) =>
    el("tr", {}, el("th", { scope: "row" }, label),
      el("td", {}, svg("svg", { class: "bar", viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { class: "a", x: 0, y: 0, height: 14, width: (1000 * stats[name]) / most }))),
      el("td", { class: "total" }, milliseconds(stats[name] / answered))))));
}

/** The latest answers, one below another on one scale of time: where each spent it. */
function drawLast(answers) {
  if (!answers.length) return;
  const total = (answer) => STAGES.reduce((sum, [name]) => sum + answer[name], 0);
  const most = Math.max(...answers.map(total)) || 1;
  const bar = (answer) => {
    let at_ = 0;
    const made = svg("svg", { class: "bar", viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img",
      "aria-label": STAGES.map(([name, label]) => `${label} ${milliseconds(answer[name])}`).join(", ") });
    STAGES.forEach(([name, label], index) => {
      const width = (1000 * answer[name]) / most;
      if (width < 0.2) return;
      const part = svg("rect", { class: `stage-${index}`, x: at_, y: 0, width, height: 14 }, svg("title"));
      part.firstChild.textContent = `${label} ${milliseconds(answer[name])}`;
      made.append(part);
      at_ += width;
    });
    return made;
  };
  const rate = (answer) => (answer.decode_ms > 0 && answer.output_tokens > 1 ? `, ${number((1000 * (answer.output_tokens - 1)) / answer.decode_ms)} tokens/s` : "");
  const rows = answers.map((answer) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: at(`/c/${answer.conversation}`) }, new Date(answer.created * 1000).toLocaleTimeString("en", { hour12: false })),
    el("span", { class: "soft" }, ` ${number(answer.prompt_tokens)} + ${number(answer.output_tokens)} tokens${rate(answer)}`)), el("td", {}, bar(answer)), el("td", { class: "total" }, milliseconds(total(answer)))));
  const scale = el("div", { class: "scale-ms" }, [0, 0.5, 1].map((share) => el("span", {}, share ? milliseconds(most * share) : "0")));
  $("last").replaceChildren(el("h3", {}, "The latest answers, by stage"),
    el("p", { class: "keys" }, STAGES.map(([, label], index) => el("span", { class: `key stage-${index}` }, label))),
    el("table", { class: "bars last" }, el("tbody", {}, rows), el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, el("span", { class: "soft" }, "time since it was asked")), el("td", {}, scale), el("td")))));
}

const showLast = () => get("/api/last").then(({ answers }) => drawLast(answers), () => {}); // without them the page is whole

async function poll() {
  if (!document.hidden) {
    try {
      const stats = await get(of("/api/stats"));
      if (samples.length && samples.at(-1).model !== stats.model) samples.length = 0; // another model's
      samples.push({ ...stats, at: performance.now() });
      if (samples.length > KEPT + 1) samples.shift();
      draw(stats);
      const answered = stats.finished + stats.cancelled;
      if (answered !== known) showLast();
      known = answered;
      $("now").classList.remove("gone");
    } catch (error) {
      $("now").replaceChildren(el("p", { class: "soft" }, error.message));
    }
  }
  setTimeout(poll, EVERY_MS);
}

const SIGNS = { none: "slow", fast: "done", slower: "slow", wrong: "warn" };

/** The first answer of the page: how it is, why, and what to do. */
function drawVerdict({ state, title, summary, findings, speed }) {
  const copy = el("button", { class: "button", type: "button", on: { click: async () => {
    try {
      await copyText(await getText(of("/api/report.txt")));
      copy.lastChild.textContent = "Copied";
      setTimeout(() => { copy.lastChild.textContent = "Copy report"; }, 1500);
    } catch (error) {
      toast(error.message);
    }
  } } }, icon("copy"), el("span", {}, "Copy report"));
  const list = findings.map(({ what, do: remedy, command }) => el("li", {}, el("p", {}, what),
    remedy || command ? el("p", { class: "remedy" }, remedy ? `${remedy} ` : "", command ? commandBox(command) : null) : null));
  $("verdict").className = `verdict ${state}`;
  $("verdict").replaceChildren(el("div", { class: "verdict-top" }, el("span", { class: "sign" }, icon(SIGNS[state])),
    el("div", { class: "verdict-words" }, el("h2", { id: "verdict-title" }, title), el("p", { class: "soft" }, summary), speed ? el("p", { class: "soft speed" }, speed) : null), state === "none" ? "" : copy),
  findings.length ? el("ul", { class: "findings" }, list) : "");
}

/** The verdict, and below it the report it is read out of. */
function showVerdict() {
  get(of("/api/verdict", "speed=1")).then((verdict) => {
    drawVerdict(verdict);
    if (verdict.state === "none") $("report").replaceChildren();
    else getText(of("/api/report")).then((html) => { $("report").innerHTML = html; }, (error) => { $("report").textContent = error.message; });
  }, (error) => { $("verdict").textContent = error.message; });
}

/** Of several models those in memory can be looked at. */
async function drawWhich() {
  const { many } = await get(of("/api/about"));
  if (!many) return;
  const [{ models }, { model }] = await Promise.all([get("/api/models"), get("/api/stats")]);
  const loaded = models.filter(({ state }) => state === "loaded").map(({ name }) => name);
  $("which").replaceChildren(...loaded.map((name) => el("option", { value: name, selected: name === (WHICH ?? model) }, name)));
  $("of-model").hidden = loaded.length < 2;
  $("which").addEventListener("change", () => { location.search = `?model=${encodeURIComponent($("which").value)}`; });
}

ignoreComposing();
themeButton($("theme"));
poll();
drawWhich().catch((error) => toast(error.message));
