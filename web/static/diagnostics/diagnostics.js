// The diagnostics page: what the server does now, asked for every second, and its warm-up report.

import { $, copyText, el, icon, svg, themeButton, toast } from "../shared/dom.js";
import { commandBox } from "../shared/command.js";
import { STAGES, milliseconds } from "../shared/format.js";
import { get, getText } from "../shared/server.js";

const EVERY_MS = 1000;
const KEPT = 120; // samples of each line
const LINES = [["Tokens written", "output_tokens", "tokens/s"], ["Requests taken", "requests", "requests/s"], ["Tiles encoded", "encode_tiles", "tiles/s"]];

const samples = [];
const number = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });

function tiles(target, rows) {
  target.replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Increase of a counter a second, sample by sample; a server that was started again counts from 0. */
function rates(name) {
  return samples.slice(1).map((sample, index) => Math.max(0, sample[name] - samples[index][name]) / ((sample.at - samples[index].at) / 1000));
}

function line([title, name, unit]) {
  const values = rates(name);
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${((KEPT - values.length + index) / (KEPT - 1)) * 1000} ${98 - (value / most) * 92}`);
  const shape = points.length > 1 ? `M${points.join("L")}` : "";
  const first = points[0]?.split(" ")[0];
  return el("figure", { class: "line" },
    el("figcaption", {}, el("span", {}, title), el("span", {}, `${number(values.at(-1) ?? 0)} ${unit}, most ${number(Math.max(0, ...values))}`)),
    svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "area", d: shape ? `${shape}L1000 98L${first} 98Z` : "" }), svg("path", { d: shape })));
}

function draw(stats) {
  $("fault").hidden = !stats.fault;
  $("fault").textContent = stats.fault ? `The server cannot answer: ${stats.fault}.` : "";
  const answered = stats.finished + stats.cancelled;
  tiles($("now"), [
    ["being answered", `${stats.running} of ${stats.slots}`], ["waiting", number(stats.waiting)], ["pictures being encoded", number(stats.encoding)],
    ["context memory in use", stats.pages ? `${number((100 * stats.pages_used) / stats.pages)} %` : "none"]]);
  $("lines").replaceChildren(...LINES.map(line));
  tiles($("since"), [
    ["requests", number(stats.requests)], ["answers", number(stats.finished)], ["stopped", number(stats.cancelled)], ["failed", number(stats.failed)],
    ["turned away", number(stats.rejected)], ["pictures", number(stats.images)],
    ["pictures from the cache", stats.images ? `${number((100 * stats.image_cache_hits) / stats.images)} %` : "none"],
    ["prompt known before", stats.prompt_tokens ? `${number((100 * stats.reused_tokens) / stats.prompt_tokens)} %` : "none"],
    ["proposed tokens accepted", stats.proposed_tokens ? `${number((100 * stats.accepted_tokens) / stats.proposed_tokens)} %` : "none proposed"],
    ["tokens a batch", stats.batches ? number(stats.batch_rows / stats.batches) : "none"], ["interrupted for others", number(stats.preemptions)]]);
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

async function poll() {
  if (!document.hidden) {
    try {
      const stats = await get("/api/stats");
      samples.push({ ...stats, at: performance.now() });
      if (samples.length > KEPT + 1) samples.shift();
      draw(stats);
      $("now").classList.remove("gone");
    } catch (error) {
      $("now").replaceChildren(el("p", { class: "soft" }, error.message));
    }
  }
  setTimeout(poll, EVERY_MS);
}

const SIGNS = { fast: "done", slower: "slow", wrong: "warn" };

/** The first answer of the page: how it is, why, and what to do. */
function drawVerdict({ state, title, summary, findings }) {
  const copy = el("button", { class: "button", type: "button", on: { click: async () => {
    try {
      await copyText(await getText("/api/report.txt"));
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
    el("div", { class: "verdict-words" }, el("h2", { id: "verdict-title" }, title), el("p", { class: "soft" }, summary)), copy),
  findings.length ? el("ul", { class: "findings" }, list) : "");
}

themeButton($("theme"));
poll();
get("/api/verdict").then(drawVerdict, (error) => { $("verdict").textContent = error.message; });
getText("/api/report").then((html) => { $("report").innerHTML = html; }, (error) => { $("report").textContent = error.message; });
