// Numbers as text, and the stages of an answer: field of a receipt or of the statistics, and its word.

export const STAGES = [["queued_ms", "waiting"], ["preprocess_ms", "preprocess"], ["encode_ms", "encode"], ["prefill_ms", "prefill"], ["decode_ms", "decode"]];

export const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** Words of somebody in a sentence of ours: what is read from right to left is not mixed up with the sentence around it. */
export const isolated = (text) => (RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text);

/** `size`: [width, height]. */
export const pixels = ([width, height]) => `${width.toLocaleString("en")} × ${height.toLocaleString("en")} px`;

export const milliseconds = (ms) => (ms >= 10_000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(2)} s`
  : ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`);
