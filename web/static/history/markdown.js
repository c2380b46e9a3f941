// A conversation as Markdown: the branch that is shown, with its pictures by name.

export function markdownOf(title, path) {
  const parts = [`# ${title || "New chat"}`];
  for (const { role, text, images } of path) {
    const pictures = images.map((image, index) => `*Picture: ${(image.name || `picture ${index + 1}`).replaceAll("*", "\\*")}*`);
    parts.push(`## ${role === "user" ? "You" : "Answer"}`, ...pictures, text);
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}
