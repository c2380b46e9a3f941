// Audio: attached, played beside the message, and recorded from the microphone as WAV, whatever the browser records.

import { $, announce, el, toast } from "../shared/dom.js";
import { pictureUrl, imagePath } from "../shared/server.js";
import { clock } from "./video.js";
import { waveForm } from "./wave.js";

const RATE = 16000; // samples a second of a recording, as models take them
const LONGEST_S = 600;

export const isAudio = (image) => Boolean(image?.kind?.startsWith("audio/"));

/** A player for audio of a message. */
export function audioPlayer(image) {
  const name = image.name || "Audio";
  const player = el("audio", { controls: true, preload: "metadata", "aria-label": `${name}, ${clock(image.seconds ?? 0)}` });
  pictureUrl(imagePath(image.sha256)).then((url) => { player.src = url; }, () => toast(`${name} is not here any more.`));
  return el("figure", { class: "audio" }, el("figcaption", { class: "soft", dir: "auto" }, name), waveForm(player, image), player);
}

/** `done(blob, name)` gets what was recorded, once it is stopped. */
export class Recorder {
  constructor(done) {
    this.done = done;
    $("record-stop").addEventListener("click", () => this.stop());
    $("record-cancel").addEventListener("click", () => this.stop(false));
  }

  static get possible() {
    return Boolean(navigator.mediaDevices?.getUserMedia && window.MediaRecorder);
  }

  async start() {
    if (this.media) return;
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    } catch (error) {
      toast(error.name === "NotAllowedError" ? "The browser does not let this page use the microphone." : "There is no microphone to record from.");
      return;
    }
    this.chunks = [];
    this.keep = true;
    this.media = new MediaRecorder(stream);
    this.media.addEventListener("dataavailable", (event) => this.chunks.push(event.data));
    this.media.addEventListener("stop", () => this.#ended(stream));
    this.context = new AudioContext();
    this.analyser = new AnalyserNode(this.context, { fftSize: 1024 });
    this.context.createMediaStreamSource(stream).connect(this.analyser);
    this.began = performance.now();
    $("recording").hidden = false;
    this.media.start();
    this.#show();
    announce("Recording");
    $("record-stop").focus();
  }

  stop(keep = true) {
    this.keep = keep;
    if (this.media?.state === "recording") this.media.stop();
  }

  /** Level and time, until it is stopped. */
  #show() {
    if (this.media?.state !== "recording") return;
    const seconds = (performance.now() - this.began) / 1000;
    const samples = new Float32Array(this.analyser.fftSize);
    this.analyser.getFloatTimeDomainData(samples);
    $("record-level").value = Math.min(1, 3 * Math.sqrt(samples.reduce((sum, one) => sum + one * one, 0) / samples.length));
    $("record-time").textContent = clock(Math.floor(seconds));
    if (seconds > LONGEST_S) this.stop();
    else requestAnimationFrame(() => this.#show());
  }

  async #ended(stream) {
    for (const track of stream.getTracks()) track.stop();
    this.context.close();
    const type = this.media.mimeType;
    this.media = null;
    $("recording").hidden = true;
    $("prompt").focus();
    if (!this.keep) return;
    try {
      const data = await new Blob(this.chunks, { type }).arrayBuffer();
      const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(data); // at that rate
      this.done(new Blob([wav(mixed(decoded))], { type: "audio/wav" }), "Recording.wav");
    } catch {
      toast("The recording is empty, or cannot be read.");
    }
  }
}

/** The mean of all channels. */
function mixed(decoded) {
  const result = new Float32Array(decoded.length);
  for (let channel = 0; channel < decoded.numberOfChannels; channel += 1) {
    decoded.getChannelData(channel).forEach((value, index) => { result[index] += value / decoded.numberOfChannels; });
  }
  return result;
}

/** Samples as a file of 16 bits (RIFF, IBM and Microsoft 1991). */
function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, word) => [...word].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  for (const [at, value] of [[20, 1], [22, 1], [32, 2], [34, 16]]) view.setUint16(at, value, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, index) => view.setInt16(44 + 2 * index, Math.max(-32768, Math.min(32767, Math.round(value * 32767))), true));
  return view.buffer;
}
