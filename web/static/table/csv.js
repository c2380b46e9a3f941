// Rows as CSV (RFC 4180), which spreadsheets open.

const QUOTED = /[",\r\n]/;
const FORMULA = /^[=+\-@\t\r]/;

/** A text that a spreadsheet would take for a formula has an apostrophe before it, as `mtmd batch` writes it. */
function cell(value) {
  const text = typeof value === "string" && FORMULA.test(value) ? `'${value}` : String(value);
  return QUOTED.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csvOf = (rows) => `\ufeff${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
