// Runs before anything is painted, so that a chosen theme does not flash. "" follows the system.
{
  const chosen = localStorage.getItem("mtmd.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
