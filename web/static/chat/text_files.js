// Text files of a message: a part of its text, each in a block below its name, so that every client, export and model sees the same.

export const LONGEST = 500_000; // characters of all files of one message
const MEDIA = /^(image|audio|video)\/(?!mp2t|vnd\.dlna\.mpeg-tts|svg)|^application\/pdf$/; // .ts is reported as an MPEG stream; SVG is text
const FENCE = /^`{3,}$/;
const HEADER = "File: ";

export const mayBeText = (file) => !MEDIA.test(file.type);

/** The file's text, or null where its bytes are not UTF-8. A file that is longer than any message takes is read as far as that. */
export async function textOf(file) {
  const bytes = new Uint8Array(await file.slice(0, 4 * LONGEST + 4).arrayBuffer());
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: bytes.length < file.size }).replaceAll("\r\n", "\n");
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // that is how it says that they are not UTF-8
    return null;
  }
}

/** `files`: [{name, content}]. */
export function withFiles(words, files) {
  return [words, ...files.map(block)].filter(Boolean).join("\n\n");
}

function block({ name, content }) {
  let longest = 2;
  for (const [ticks] of content.matchAll(/`+/g)) longest = Math.max(longest, ticks.length);
  const fence = "`".repeat(longest + 1);
  return `${HEADER}${name.replaceAll(/[\u0000-\u001f]/g, " ")}\n${fence}\n${content}${content.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Split what `withFiles` made: {words, files}. A text that ends in another way has no files. */
export function splitFiles(text) {
  const lines = text.split("\n");
  let [files, words] = [[], lines.length];
  for (let at = 0; at < lines.length;) {
    const fence = lines[at].startsWith(HEADER) && (at === 0 || lines[at - 1] === "") && FENCE.test(lines[at + 1] ?? "") ? lines[at + 1] : null;
    const end = fence ? lines.indexOf(fence, at + 2) : -1;
    if (fence && end < 0) break;
    if (fence) {
      if (!files.length) words = Math.max(0, at - 1);
      files.push({ name: lines[at].slice(HEADER.length), content: lines.slice(at + 2, end).join("\n") });
      at = end + (lines[end + 1] === "" ? 2 : 1);
      if (end === lines.length - 1) return { words: lines.slice(0, words).join("\n"), files };
    } else {
      [files, words] = [[], lines.length];
      at += 1;
    }
  }
  return { words: text, files: [] };
}
