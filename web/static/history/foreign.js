// Conversations that ChatGPT or Open WebUI exported, as files of ours. What is no text there is named in brackets.

const ROLES = { user: "user", assistant: "assistant" };
const TITLE_MAX = 200;
const DATA_URL = /^data:image\/[a-z+]{1,12};base64,/;

/** {conversations, images} in our form, null for a file of nobody that is known. `file`: the parsed JSON. */
export function fromElsewhere(file) {
  const list = Array.isArray(file) ? file : [file];
  const reader = [chatgpt, openWebui].find((one) => list.length > 0 && list.every((each) => one.knows(each)));
  if (!reader) return null;
  const images = {};
  return { conversations: list.map((each) => conversation(reader, each, images)).filter(({ messages }) => messages.length), images };
}

const chatgpt = {
  knows: (each) => typeof each?.mapping === "object" && each.mapping !== null,
  title: (each) => each.title,
  times: (each) => [each.create_time, each.update_time],
  head: (each) => each.current_node,
  nodes: (each) => Object.values(each.mapping).map(({ id, parent, message }) => ({ id, parent, role: message?.author?.role, created: message?.create_time,
    text: message?.metadata?.is_visually_hidden_from_conversation ? "" : partsOf(message?.content), pictures: [] })),
};

function partsOf(content) {
  if (content?.content_type !== "text" && content?.content_type !== "multimodal_text") return "";
  return (content.parts ?? []).map((part) => (typeof part === "string" ? part : `[${part?.content_type === "image_asset_pointer" ? "picture" : part?.content_type ?? "something else"}]`)).join("\n\n");
}

const openWebui = {
  knows: (each) => typeof each?.chat?.history?.messages === "object" && each.chat.history.messages !== null,
  title: (each) => each.title ?? each.chat.title,
  times: (each) => [each.created_at, each.updated_at],
  head: (each) => each.chat.history.currentId,
  nodes: (each) => Object.values(each.chat.history.messages).map(({ id, parentId, role, content, timestamp, files }) => ({ id, parent: parentId, role, created: timestamp,
    text: typeof content === "string" ? content : "", pictures: (files ?? []).filter(({ type, url }) => type === "image" && DATA_URL.test(url ?? "")).map(({ url, name }) => ({ url, name })) })),
};

/** Its messages with parents before children; below one that is left out stand those that follow it. */
function conversation(reader, each, images) {
  const nodes = new Map(reader.nodes(each).map((node) => [node.id, node]));
  const kept = (node) => ROLES[node.role] && (node.text.trim() || node.pictures.length);
  const above = (id) => {
    const seen = new Set();
    let at = nodes.get(id);
    while (at && !kept(at) && !seen.has(at.id)) {
      seen.add(at.id);
      at = nodes.get(at.parent);
    }
    return at && kept(at) ? at.id : null;
  };
  const children = new Map();
  for (const node of nodes.values()) if (kept(node)) {
    const parent = above(node.parent);
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const [created, changed] = reader.times(each).map(seconds);
  const messages = [];
  const waiting = [...(children.get(null) ?? [])].map((node) => [node, null]).reverse();
  while (waiting.length) {
    const [node, parent] = waiting.pop();
    messages.push({ id: node.id, parent, role: ROLES[node.role], text: node.text, state: "complete", images: node.pictures.map((picture) => put(picture, images)),
      options: null, receipt: null, error: null, created: seconds(node.created ?? created) });
    for (const child of (children.get(node.id) ?? []).reverse()) waiting.push([child, node.id]);
  }
  return { title: String(reader.title(each) ?? "").slice(0, TITLE_MAX), head: above(reader.head(each)) ?? messages.at(-1)?.id ?? null, created, changed, messages };
}

/** Its name in the file that is made. */
function put({ url, name }, images) {
  const sha256 = `picture ${Object.keys(images).length + 1}`;
  images[sha256] = url.slice(url.indexOf(",") + 1);
  return { sha256, name: String(name ?? "").slice(0, TITLE_MAX) };
}

const seconds = (value) => (typeof value === "number" && value > 0 && value < 1e11 ? value : Date.now() / 1000);
