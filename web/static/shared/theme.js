// Runs before anything is painted, so that a chosen theme does not flash. "" follows the system.
{
  const chosen = localStorage.getItem("mtmd.theme");
  const icon = document.querySelector("link[rel=icon]");
  icon.href = icon.href; // in full: the page's own address changes while it is open
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
